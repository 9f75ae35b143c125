"""The behaviours of torchrun and its API, one test each, run with elasticlib, with torchrun, and with nothing."""
