//! The capture loop: rounds, pacing, last stop.
