"""Can a cluster hold a run? Cluster files read as Ray reads them, and compared with what the run asks for."""
