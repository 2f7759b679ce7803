"""Many runs from one command, on one machine or on a cluster."""
