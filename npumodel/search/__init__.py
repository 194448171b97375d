"""How tiles are chosen.

space      the lattice of tiles, which are legal, and exact prices in batches
rules      named levels, part counts, the rule of thumb, the default
gradient   descent on real knobs, rounding, exact polish
tuner      `tune`: one search with its budget, and what it found
sweep      the price, and the tile, on other hardware
table      learned tiles on disk
export     tables in the formats of other tools
perf_model prices for the autotuner of Triton
auto       which of all these answers a call: the one resolution order
"""
