//! Architecture x86_64, 64-bit mode only.
//!
//! The stub is position-dependent code that has every value it restores as an immediate operand, so it needs
//! neither the stack nor other memory. `syscall` changes only `rax`, `rcx` and `r11` and keeps the flags;
//! `mov` and `jmp` keep them too. Shadow stacks are not affected, because there is no `ret`.

use super::{Call, ForeignMode, SyscallStub};

/// General registers in ptrace's layout (`NT_PRSTATUS`).
pub(crate) type Registers = libc::user_regs_struct;

/// Bytes of a stub and a zero byte after it.
pub(crate) const STUB_SIZE: usize = 112;

/// Code segment of 64-bit programs: `__USER_CS` of the kernel's `asm/segment.h`.
const USER_CS: u64 = 0x33;

// Codes by which the kernel marks a system call that a stop interrupted (include/linux/errno.h).
const ERESTARTSYS: i64 = -512;
const ERESTARTNOINTR: i64 = -513;
const ERESTARTNOHAND: i64 = -514;
const ERESTART_RESTARTBLOCK: i64 = -516;
/// Length of the `syscall` instruction.
const SYSCALL_LEN: u64 = 2;

pub(crate) fn program_counter(regs: &Registers) -> u64 {
    regs.rip
}

/// Generates code for address `at` that makes `call` in a thread stopped with `regs`, and then continues as
/// the thread would have continued.
pub(crate) fn build_stub(regs: &Registers, at: u64, call: Call) -> Result<SyscallStub, ForeignMode> {
    if regs.cs != USER_CS {
        return Err(ForeignMode);
    }
    let (rip, rax) = resumption(regs);
    let mut code = Vec::with_capacity(STUB_SIZE);
    let [first, second, third] = call.arguments;
    put32(&mut code, &[0xb8], call.number); // mov eax, number
    put64(&mut code, &[0x48, 0xbf], first); // movabs rdi, …
    put64(&mut code, &[0x48, 0xbe], second); // movabs rsi, …
    put64(&mut code, &[0x48, 0xba], third); // movabs rdx, …
    code.extend([0x0f, 0x05]); // syscall
    let returned = at + code.len() as u64;
    put64(&mut code, &[0x48, 0xb8], rax); // movabs rax, …
    put64(&mut code, &[0x48, 0xbf], regs.rdi);
    put64(&mut code, &[0x48, 0xbe], regs.rsi);
    put64(&mut code, &[0x48, 0xba], regs.rdx);
    put64(&mut code, &[0x48, 0xb9], regs.rcx);
    put64(&mut code, &[0x49, 0xbb], regs.r11);
    put64(&mut code, &[0xff, 0x25, 0, 0, 0, 0], rip); // jmp [rip + 0], with the address behind it
    // A negative orig_rax means that no system call is in progress, so the kernel leaves rax and rip alone.
    let start = Registers { rip: at, rax: 0, orig_rax: u64::MAX, ..*regs };
    Ok(SyscallStub { code, start, returned })
}

/// Program counter and `rax` with which the thread continues: the kernel's `arch_do_signal_or_restart`, if no
/// handler runs. The stub must not disturb the thread's restart block; none of the calls made here does.
fn resumption(regs: &Registers) -> (u64, u64) {
    if (regs.orig_rax as i64) < 0 {
        return (regs.rip, regs.rax);
    }
    match regs.rax as i64 {
        ERESTARTSYS | ERESTARTNOINTR | ERESTARTNOHAND => (regs.rip - SYSCALL_LEN, regs.orig_rax),
        ERESTART_RESTARTBLOCK => (regs.rip - SYSCALL_LEN, libc::SYS_restart_syscall as u64),
        _ => (regs.rip, regs.rax),
    }
}

fn put32(code: &mut Vec<u8>, opcode: &[u8], value: u32) {
    code.extend(opcode);
    code.extend(value.to_le_bytes());
}

fn put64(code: &mut Vec<u8>, opcode: &[u8], value: u64) {
    code.extend(opcode);
    code.extend(value.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stopped(rax: i64, orig_rax: i64) -> Registers {
        // SAFETY: the structure has only integers, for which zero is valid.
        let zero: Registers = unsafe { std::mem::zeroed() };
        Registers { cs: USER_CS, rip: 0x1000, rax: rax as u64, orig_rax: orig_rax as u64, ..zero }
    }

    #[test]
    fn an_interrupted_call_restarts_as_the_kernel_would_restart_it() {
        let ppoll = libc::SYS_ppoll;
        assert_eq!(resumption(&stopped(ERESTARTNOHAND, ppoll)), (0xffe, ppoll as u64));
        assert_eq!(resumption(&stopped(ERESTART_RESTARTBLOCK, ppoll)), (0xffe, 219));
        assert_eq!(resumption(&stopped(-4, ppoll)), (0x1000, -4_i64 as u64));
        assert_eq!(
            resumption(&stopped(ERESTARTSYS, -1)),
            (0x1000, ERESTARTSYS as u64),
            "a computed value, no call"
        );
    }

    #[test]
    fn the_detour_fits_its_slot_and_a_32_bit_thread_is_refused() {
        let call = Call { number: 323, arguments: [u64::MAX; 3] };
        let made = build_stub(&stopped(0, -1), 0x2000, call).unwrap();
        assert!(made.code.len() < STUB_SIZE, "a zero byte stays behind it");
        assert_eq!((made.start.rip, made.returned), (0x2000, 0x2025));
        let compat = Registers { cs: 0x23, ..stopped(0, -1) };
        assert_eq!(build_stub(&compat, 0x2000, call).unwrap_err(), ForeignMode);
    }
}
