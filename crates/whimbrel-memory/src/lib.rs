//! Attach to the memory of a running process: mapping, dirty sets, lazy pages.
