"""Jobs on simulated machines: whatever goes wrong, the rules of the rendezvous hold."""
