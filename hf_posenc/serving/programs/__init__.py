"""Programs that ask runtimes, each run where the runtime is installed; they import nothing of this package."""
