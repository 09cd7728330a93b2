//! Symbols for threads: creation, joining, waiting for a word. Each new thread waits for the baton before
//! its first instruction, and passes it on after its last destructor.

use super::result;
use crate::{
    raw,
    world::{
        baton,
        calls::enter,
        is_inside, me,
        schedule::{ThreadId, ThreadState, Wait},
        set_me, with,
    },
};
use std::{
    collections::BTreeMap,
    ffi::{c_int, c_long, c_void},
    sync::{Mutex, PoisonError, atomic::AtomicU32},
};

type Start = extern "C" fn(*mut c_void) -> *mut c_void;

/// What a new thread is given.
struct Begin {
    id: ThreadId,
    word: &'static AtomicU32,
    start: Start,
    argument: *mut c_void,
}

/// Threads by the name that the C library has for them.
static NAMES: Mutex<BTreeMap<libc::pthread_t, ThreadId>> = Mutex::new(BTreeMap::new());

#[unsafe(no_mangle)]
unsafe extern "C" fn pthread_create(
    out: *mut libc::pthread_t,
    attributes: *const c_void,
    start: Start,
    argument: *mut c_void,
) -> c_int {
    type Create = unsafe extern "C" fn(*mut libc::pthread_t, *const c_void, Start, *mut c_void) -> c_int;
    // SAFETY: this is the type that pthread_create(3) documents.
    let create: Create = unsafe { raw::next(c"pthread_create") };
    if !is_inside() {
        // SAFETY: the arguments are the caller's own.
        return unsafe { create(out, attributes, start, argument) };
    }
    enter("spawn", 0);
    let word = baton::new_word();
    let id = with(|world| {
        let process = world.processes.take_starting().unwrap_or_else(|| world.process(me()));
        world.schedule.add(process, word)
    });
    let begin = Box::into_raw(Box::new(Begin { id, word, start, argument }));
    // SAFETY: `first` takes the box back, once; the other arguments are the caller's own.
    let created = with(|_| unsafe { create(out, attributes, first, begin.cast()) });
    assert_eq!(created, 0, "the real system starts no more threads");
    // SAFETY: the call above has written the name there.
    let name = unsafe { *out };
    with(|_| NAMES.lock().unwrap_or_else(PoisonError::into_inner).insert(name, id));
    baton::point();
    0
}

/// First function of every simulated thread.
extern "C" fn first(begin: *mut c_void) -> *mut c_void {
    // SAFETY: `pthread_create` above has made the box, and this is the only function that takes it.
    let begin = unsafe { Box::from_raw(begin.cast::<Begin>()) };
    let Begin { id, word, start, argument } = *begin;
    baton::await_turn(word);
    set_me(id);
    watch_exit();
    start(argument)
}

/// Lets this thread pass the baton on when it ends. Registered before any other destructor of a thread, it
/// is called after them.
fn watch_exit() {
    type Destructor = extern "C" fn(*mut c_void);
    unsafe extern "C" {
        fn __cxa_thread_atexit_impl(gone: Destructor, object: *mut c_void, library: *const c_void) -> c_int;
        static __dso_handle: u8;
    }
    // SAFETY: the function is glibc's, and `gone` takes any object.
    unsafe { __cxa_thread_atexit_impl(gone, std::ptr::null_mut(), (&raw const __dso_handle).cast()) };
}

extern "C" fn gone(_: *mut c_void) {
    let id = me();
    enter("exit", 0);
    // A thread whose process has ended is dead already.
    with(|world| world.schedule.finish(id));
    set_me(0);
    baton::leave();
}

#[unsafe(no_mangle)]
unsafe extern "C" fn pthread_join(thread: libc::pthread_t, value: *mut *mut c_void) -> c_int {
    type Join = unsafe extern "C" fn(libc::pthread_t, *mut *mut c_void) -> c_int;
    if is_inside() {
        enter("join", 0);
        let id = with(|_| NAMES.lock().unwrap_or_else(PoisonError::into_inner).remove(&thread));
        let ended = |id| with(|world| world.schedule.threads[&id].state == ThreadState::Finished);
        while id.is_some_and(|id| !ended(id)) {
            baton::wait(Wait::Join(id.unwrap_or_default()), None);
        }
    }
    // SAFETY: this is the type that pthread_join(3) documents.
    let join: Join = unsafe { raw::next(c"pthread_join") };
    // SAFETY: the arguments are the caller's own. The thread has passed the baton on and ends by itself.
    unsafe { join(thread, value) }
}

#[unsafe(no_mangle)]
extern "C" fn sched_yield() -> c_int {
    if is_inside() {
        enter("yield", 0);
        with(|world| world.schedule.now += 1_000);
        baton::point();
    }
    0
}

/// Always two processors: how many threads the program starts must not depend on the machine.
#[unsafe(no_mangle)]
unsafe extern "C" fn sched_getaffinity(_: c_int, len: usize, set: *mut u8) -> c_int {
    // SAFETY: the caller's set has `len` bytes.
    unsafe {
        std::ptr::write_bytes(set, 0, len);
        *set = 3;
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn syscall(
    number: c_long,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> c_long {
    if !is_inside() {
        // SAFETY: the arguments are the caller's own.
        return unsafe { raw::pass(number, [a, b, c, d, e, f]) } as c_long;
    }
    match number {
        // SAFETY: the arguments are the caller's own.
        libc::SYS_futex => unsafe { futex(a, b as c_int, c, d) },
        // SAFETY: as above; getrandom(2) has the same arguments.
        libc::SYS_getrandom => unsafe { super::system::getrandom(a as *mut u8, b, c as u32) as c_long },
        // SAFETY: as above; statx(2) has the same arguments.
        libc::SYS_statx => unsafe {
            super::files::statx(a as c_int, b as *const _, c as c_int, d as u32, e as *mut _) as c_long
        },
        libc::SYS_gettid => c_long::from(me()),
        other => panic!("the program makes system call {other}, which is not simulated"),
    }
}

/// Waits for a word or wakes others that do, as the standard library's locks, channels and parking do it.
///
/// # Safety
///
/// The arguments must be those of futex(2).
unsafe fn futex(word: usize, operation: c_int, value: usize, timeout: usize) -> c_long {
    match operation & !libc::FUTEX_PRIVATE_FLAG {
        wait @ (libc::FUTEX_WAIT | libc::FUTEX_WAIT_BITSET) => {
            enter("futex wait", 0);
            // SAFETY: futex(2) demands the address of a word.
            let word_now = unsafe { &*(word as *const AtomicU32) }.load(std::sync::atomic::Ordering::SeqCst);
            if word_now != value as u32 {
                return result::<isize>(Err(libc::EAGAIN)) as c_long;
            }
            // SAFETY: futex(2) demands the address of a time, or none.
            let time = unsafe { (timeout as *const libc::timespec).as_ref() };
            let now = with(|world| world.schedule.now);
            let deadline = time.map(|time| {
                let time = time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64;
                if wait == libc::FUTEX_WAIT { now + time } else { time }
            });
            let woken = baton::wait(Wait::Futex(word), deadline);
            if woken { 0 } else { result::<isize>(Err(libc::ETIMEDOUT)) as c_long }
        }
        libc::FUTEX_WAKE | libc::FUTEX_WAKE_BITSET => {
            enter("futex wake", 0);
            let woken = with(|world| world.schedule.wake_futex(word, value));
            baton::point();
            woken as c_long
        }
        other => panic!("the program makes futex call {other}, which is not simulated"),
    }
}
