"""Other people's benchmarks: lm-eval's tasks and LongEmbed."""
