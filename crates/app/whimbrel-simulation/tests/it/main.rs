//! Runs of the simulation as the gate makes them: new seeds each time, which are printed.

use std::{
    collections::BTreeSet,
    process::{Command, Output},
};

fn simulate(words: &[&str]) -> Output {
    let output = Command::new(env!("CARGO_BIN_EXE_whimbrel-simulation")).args(words).output().unwrap();
    print!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    output
}

#[test]
fn new_seeds_break_no_rule() {
    assert!(simulate(&["--seeds", "200"]).status.success());
}

#[test]
fn a_seed_that_runs_twice_makes_the_same_calls_at_the_same_times() {
    assert!(simulate(&["--seeds", "20", "--twice"]).status.success());
}

#[test]
fn losses_that_are_brought_back_are_found() {
    let output = simulate(&["--losses", "--quick"]);
    assert!(output.status.success());
}

#[test]
fn a_seed_of_a_loss_fails_and_tells_its_story() {
    let output = simulate(&["--scene", "store", "--loss", "SmallFileNotSynced", "--seeds", "10"]);
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(!output.status.success(), "a store without syncs passes");
    for expected in ["breaks the rule", "loses power", "the last calls:", "repeat it with"] {
        assert!(told.contains(expected), "{expected:?} is not told");
    }
}

/// Functions of the C library that touch only this process: its memory, its threads' own data, text,
/// unwinding. The locks are those of aws-lc, which a store with a key needs; no scene has one.
const HARMLESS: &str = "\
    __assert_fail __cxa_finalize __cxa_thread_atexit_impl __errno_location __isoc99_sscanf __libc_start_main \
    __tls_get_addr __xpg_strerror_r abort bcmp calloc dl_iterate_phdr dlsym fprintf free getauxval getenv \
    fwrite madvise malloc memcmp memcpy memmove memset mprotect munmap perror posix_memalign \
    pthread_attr_destroy pthread_attr_getguardsize pthread_attr_getstack pthread_attr_init \
    pthread_attr_setstacksize pthread_detach pthread_getattr_np pthread_getspecific pthread_key_create \
    pthread_key_delete pthread_mutex_lock pthread_mutex_unlock pthread_once pthread_rwlock_init \
    pthread_rwlock_rdlock pthread_rwlock_unlock pthread_rwlock_wrlock pthread_self pthread_setname_np \
    pthread_setspecific realloc sigaction sigaltstack signal stderr strchr strlen sysconf";
/// Functions that only the parent of seeds calls, the standard library before `main` and in a backtrace, or
/// aws-lc where the kernel has no random numbers.
const OUTSIDE: &str =
    "alarm dup dup2 fork fstat64 getcwd gettid ioctl pause pipe2 poll readlink realpath stat stat64 waitpid";

#[test]
fn no_call_of_the_c_library_leaves_the_simulation_unseen() {
    let mut nm = Command::new("nm");
    nm.args(["-D", "--undefined-only", env!("CARGO_BIN_EXE_whimbrel-simulation")]);
    let listed = String::from_utf8(nm.output().unwrap().stdout).unwrap();
    let names = listed.lines().filter_map(|line| line.split_whitespace().last()?.split('@').next());
    let known: BTreeSet<&str> = HARMLESS.split_whitespace().chain(OUTSIDE.split_whitespace()).collect();
    // Weak symbols of libraries that are not there, and the unwinder's.
    let is_weak =
        |name: &str| ["_Unwind_", "_ITM_", "__gmon", "OPENSSL_", "ZSTD_"].iter().any(|p| name.starts_with(p));
    let unseen: Vec<&str> =
        names.filter(|name| *name != "sdallocx" && !is_weak(name) && !known.contains(name)).collect();
    assert!(!listed.is_empty());
    assert_eq!(unseen, [""; 0], "define them in src/symbols, or argue here that they are harmless");
}
