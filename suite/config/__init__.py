"""What people type (sweeps, tasks, search spaces) and the errors they get when it is wrong."""
