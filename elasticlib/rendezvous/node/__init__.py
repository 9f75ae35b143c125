"""One node's side of the rendezvous: its session with the coordinator, its liveness, and the threads around them."""
