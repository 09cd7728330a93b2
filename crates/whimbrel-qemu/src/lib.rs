//! Drive an unmodified QEMU: launch, QMP, device state, pool.
