"""Many steps of some slots: rollouts in groups, numbered episodes, slots that are paused, or one by itself."""
