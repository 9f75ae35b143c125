"""
torch's module paths: what is ``torch.distributed.elastic.X`` there is `elasticlib.elastic.X` here.

Re-exports only, of the same objects that our own packages have; nothing else in elasticlib imports from here.
"""
