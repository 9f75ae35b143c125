"""The command line: options, the parser, and what is asked for by their values. `elasticlib.run` is its way in."""
