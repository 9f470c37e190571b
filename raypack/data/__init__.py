"""Corpora: tokenizers, build, random access, the stream of samples (independent of the world), a rank's own tokens."""
