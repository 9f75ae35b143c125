"""Tests and generators of the pages of `elasticlib/docs` made wholly or partly from the code."""
