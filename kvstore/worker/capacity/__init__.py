"""Room on the volumes: who gets it, who gives it up."""
