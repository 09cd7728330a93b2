//! Target process of the tests: maps memory and executes commands, one line each on its standard input,
//! answering each with one line.
//!
//! It can also be a tracer that attaches to a target and may be killed meanwhile. Not part of the product.

use std::{
    fs::File,
    io::{BufRead, Write},
    os::fd::AsRawFd,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::{Duration, Instant},
};
use whimbrel_memory::{Attachment, Mode, RamTarget};

const PAGE: usize = 4096;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve", kind, path, pages] => serve(kind, path, pages.parse().expect("pages")),
        ["compute"] => compute(),
        ["attach", pid, path] => attach(pid.parse().expect("pid"), path),
        ["attach-until", pid, path, when] => {
            match when.split_once(':') {
                Some((call, argument)) => die_before(call, argument),
                None => die_after(Duration::from_micros(when.parse().expect("microseconds"))),
            }
            attach(pid.parse().expect("pid"), path);
        }
        ["vfork"] => vfork(),
        _ => panic!("unknown arguments {args:?}"),
    }
}

/// Maps memory and serves `write PAGE BYTE`, `sum PAGE`, `sums PAGE...` (each on a thread of its own), `give
/// PAGE`, `race WRITES`; prints the address first.
fn serve(kind: &str, path: &str, pages: usize) {
    let (flags, fd) = match kind {
        "shared" => (libc::MAP_SHARED, open(path)),
        "private" => (libc::MAP_PRIVATE, open(path)),
        _ => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, None),
    };
    let raw = fd.as_ref().map_or(-1, AsRawFd::as_raw_fd);
    // SAFETY: a new mapping at an address of the kernel's choice overlaps no memory in use.
    let base = unsafe {
        libc::mmap(std::ptr::null_mut(), pages * PAGE, libc::PROT_READ | libc::PROT_WRITE, flags, raw, 0)
    };
    assert_ne!(base, libc::MAP_FAILED);
    // SAFETY: the mapping was just created with this many pages and is never unmapped.
    unsafe { libc::madvise(base, pages * PAGE, libc::MADV_NOHUGEPAGE) };
    let at = |page: usize| {
        assert!(page < pages);
        // SAFETY: the address is inside the mapping, by the assertion.
        unsafe { base.cast::<u8>().add(page * PAGE) }
    };
    println!("{base:p}");
    for line in std::io::stdin().lock().lines() {
        let line = line.expect("a line");
        let words: Vec<&str> = line.split(' ').collect();
        let number = |at: usize| words[at].parse::<usize>().expect("a number");
        let start = base.expose_provenance();
        let sum = |page: usize| {
            assert!(page < pages);
            let page = std::ptr::with_exposed_provenance::<u8>(start + page * PAGE);
            // SAFETY: volatile reads of one page inside the mapping, by the assertion.
            (0..PAGE)
                .fold(0_u64, |sum, i| sum.rotate_left(5) ^ u64::from(unsafe { page.add(i).read_volatile() }))
        };
        let answer = match words[0] {
            // SAFETY: a volatile write of one byte inside the mapping.
            "write" => unsafe {
                at(number(1)).add(17).write_volatile(number(2) as u8);
                0
            },
            "sum" => sum(number(1)),
            "sums" => std::thread::scope(|scope| {
                let sum = &sum;
                let sums = (1..words.len()).map(&number).map(|page| scope.spawn(move || sum(page)));
                let sums = sums.collect::<Vec<_>>().into_iter();
                sums.fold(0, |all, sum| all ^ sum.join().expect("no panic"))
            }),
            "race" => {
                race(number(1), pages, &at);
                0
            }
            // SAFETY: a descriptor that lives as long as this function, and a whole page of the mapping.
            // QEMU releases a page in this way: a hole in the file, then its own page is dropped.
            "give" => unsafe {
                let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                let (offset, len) = ((number(1) * PAGE) as i64, PAGE as i64);
                assert_eq!(libc::fallocate(raw, punch, offset, len), 0);
                assert_eq!(libc::madvise(at(number(1)).cast(), PAGE, libc::MADV_DONTNEED), 0);
                0
            },
            word => panic!("unknown word {word}"),
        };
        println!("{answer}");
    }
}

/// Makes the first number of pages grow, of 64 neighbours after the other, each once, in an order that leaves
/// holes until the end.
fn race(writes: usize, pages: usize, at: &impl Fn(usize) -> *mut u8) {
    for write in 0..writes {
        let page = (write / 64 * 64 + write * 37 % 64) % pages;
        let word = at(page).cast::<u64>();
        // SAFETY: a volatile read and write inside a page of the mapping, at a multiple of eight.
        unsafe { word.write_volatile(word.read_volatile() + 1) };
    }
}

fn open(path: &str) -> Option<File> {
    Some(File::options().read(true).write(true).open(path).expect("open the RAM file"))
}

static DONE: AtomicBool = AtomicBool::new(false);
static ROUNDS: AtomicU64 = AtomicU64::new(0);
static TICKS: AtomicU64 = AtomicU64::new(0);

extern "C" fn tick(_: i32) {
    TICKS.fetch_add(1, Ordering::Relaxed);
}

extern "C" fn finish(_: i32) {
    DONE.store(true, Ordering::Relaxed);
}

/// Alternates floating point computations and blocking system calls until SIGTERM; then checks that every
/// result and every sleep was undisturbed. Exit code 0 means success.
fn compute() {
    for (signal, handler) in [(libc::SIGUSR1, tick as extern "C" fn(i32)), (libc::SIGTERM, finish)] {
        // SAFETY: both handlers only touch atomics. No SA_RESTART, so a signal ends a sleep, as one would
        // notice.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler as *const () as usize;
            assert_eq!(libc::sigaction(signal, &raw const action, std::ptr::null_mut()), 0);
        }
    }
    let expected = numbers();
    println!("ready");
    std::io::stdout().flush().expect("flush");
    let asked = std::thread::spawn(|| {
        let mut line = String::new();
        std::io::stdin().read_line(&mut line).expect("a line");
        let start = ROUNDS.load(Ordering::Relaxed);
        while ROUNDS.load(Ordering::Relaxed) < start + 16 {
            std::thread::sleep(Duration::from_millis(1));
        }
        println!("gone on");
    });
    while !DONE.load(Ordering::Relaxed) {
        assert_eq!(numbers(), expected, "a register was disturbed");
        blocked(ROUNDS.fetch_add(1, Ordering::Relaxed));
    }
    asked.join().expect("no panic");
    println!("{} {}", ROUNDS.load(Ordering::Relaxed), TICKS.load(Ordering::Relaxed));
}

/// Sum that uses many vector registers at once.
fn numbers() -> [u64; 8] {
    let mut lanes = [1.0_f64, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7];
    for step in 0..20_000 {
        for lane in &mut lanes {
            *lane = (*lane * 1.000_001 + f64::from(step)).sqrt() + 1.0;
        }
    }
    lanes.map(f64::to_bits)
}

/// Makes one of three calls that restart in three different ways. EINTR is right only after a signal.
fn blocked(round: u64) {
    let before = TICKS.load(Ordering::Relaxed);
    let wait = libc::timespec { tv_sec: 0, tv_nsec: 1_000_000 };
    // SAFETY: calls that read the structures given, which are live locals, and an empty list of descriptors.
    let result = unsafe {
        match round % 3 {
            0 => libc::nanosleep(&raw const wait, std::ptr::null_mut()),
            1 => {
                let mut mask: libc::sigset_t = std::mem::zeroed();
                libc::sigfillset(&raw mut mask);
                libc::sigdelset(&raw mut mask, libc::SIGUSR1);
                libc::ppoll(std::ptr::null_mut(), 0, &raw const wait, &raw const mask)
            }
            _ => libc::poll(std::ptr::null_mut(), 0, 1),
        }
    };
    if result != 0 {
        let error = std::io::Error::last_os_error();
        assert_eq!(error.raw_os_error(), Some(libc::EINTR));
        let signalled = TICKS.load(Ordering::Relaxed) > before || DONE.load(Ordering::Relaxed);
        assert!(signalled, "call {} was cut short without a signal", round % 3);
    }
    let mut mask: libc::sigset_t = {
        // SAFETY: a signal set of plain integers, for which zero is a value.
        unsafe { std::mem::zeroed() }
    };
    // SAFETY: asks for the mask of this thread into a live local.
    let blocked = unsafe {
        libc::sigprocmask(libc::SIG_BLOCK, std::ptr::null(), &raw mut mask);
        libc::sigismember(&raw const mask, libc::SIGTERM)
    };
    assert_eq!(blocked, 0, "a temporary signal mask was left in place");
}

/// Kills this process when the time is over.
fn die_after(time: Duration) {
    let start = Instant::now();
    std::thread::spawn(move || {
        while start.elapsed() < time {
            std::hint::spin_loop();
        }
        // SAFETY: sends a signal to ourselves.
        unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    });
}

/// Lets the kernel kill this process when it makes system call `call` with this argument (`index:value`).
fn die_before(call: &str, argument: &str) {
    let (index, value) = argument.split_once(':').expect("index:value");
    let number = |text: &str| text.parse::<u32>().expect("a number");
    // Offsets in `struct seccomp_data`: the call's number, and the lower half of an argument.
    let arguments = 16 + 8 * number(index);
    let load = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    let equal = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    let answer = (libc::BPF_RET | libc::BPF_K) as u16;
    let step = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let mut filter = [
        step(load, 0, 0, 0),
        step(equal, 0, 3, number(call)),
        step(load, 0, 0, arguments),
        step(equal, 0, 1, number(value)),
        step(answer, 0, 0, libc::SECCOMP_RET_KILL_PROCESS),
        step(answer, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: both calls read their arguments; the program and its steps are live locals, and the kernel
    // copies them.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program), 0);
    }
}

/// Blocks where no tracer can stop it: in `vfork`, whose child sleeps.
fn vfork() {
    println!("waiting");
    let parent = std::process::id() as i32;
    // SAFETY: with a null stack and CLONE_VM the child runs on ours while we are held, as after vfork(2); it
    // makes two system calls through plain wrappers and never returns from here.
    unsafe {
        let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
        if libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) == 0 {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            if libc::getppid() == parent {
                libc::pause();
            }
            libc::_exit(0);
        }
    }
}

/// Attaches, reports that, and waits to be killed.
fn attach(pid: i32, path: &str) {
    let target = match path.split_once("+") {
        Some((start, bytes)) => {
            let start = u64::from_str_radix(start.trim_start_matches("0x"), 16).expect("an address");
            RamTarget::Range(start, bytes.parse().expect("bytes"))
        }
        None => RamTarget::Path(path.into()),
    };
    let mode = if path.contains("lazy") { Mode::Lazy } else { Mode::Track };
    let attachment = Attachment::attach(pid, target, mode).expect("attach");
    println!("attached {}", attachment.page_count());
    std::thread::sleep(Duration::from_secs(600));
}
