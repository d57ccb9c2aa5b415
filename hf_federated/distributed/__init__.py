"""Process group of one `accelerate launch`, and the report of a failure to all its processes."""
