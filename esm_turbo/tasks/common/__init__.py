"""What the tasks share: options, argument checks, arms, memory estimates, rankings and progress."""
