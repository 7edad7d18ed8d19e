"""Pipeline schedules as Timelines of real ranks: how they are run, what of them is idle, and pictures."""
