"""Attention on one rank: packed documents, the kernels that compute it, parts merged by log-sum-exp."""
