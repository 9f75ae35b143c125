"""What holds the pages of `elasticlib/docs` that are made from the code, in whole or in part."""
