"""Many measurements: job by job, each kept as soon as it is made."""
