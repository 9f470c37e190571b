"""The local search of the policies: a plan under change, its neighbourhoods priced at once, each policy's rules."""
