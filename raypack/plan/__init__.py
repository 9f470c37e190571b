"""The ground floor, pure: ranks and blocks, samples, placements, plans and their file, the closed lists of names."""
