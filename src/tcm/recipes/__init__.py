"""What a run is, and the runs that we ship."""
