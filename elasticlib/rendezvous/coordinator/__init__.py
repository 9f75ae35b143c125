"""The coordinator of a job: who is in a round, when it starts and ends, who is lost, how the job ends. Pure."""
