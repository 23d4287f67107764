//! Tests of the processors on which the threads that read /dev/fuse run: gathered for a lone client, spread when its
//! requests stop and for many clients, never more than the process may use.
//!
//! Method: this process serves a mount in memory. Programs in other processes make requests, and /proc shows where the
//! threads may run. The tests change the affinity of this process, so they run one after the other.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use tempfile::TempDir;
use ubtrfs_device::{Device, MemoryDevice};
use ubtrfs_fs::{Fs, MountOptions};
use ubtrfs_fuse::transport::Transport;
use ubtrfs_fuse::{MountConfig, MountError, Session};
use ubtrfs_testkit::capability;

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// A mount that this process serves.
struct Served {
    dir: TempDir,
    server: Option<JoinHandle<Result<(), MountError>>>,
    /// The processors of this process, as in `Cpus_allowed_list`.
    all: String,
    _alone: MutexGuard<'static, ()>,
}

impl Served {
    /// `None` if this machine cannot run the tests.
    fn new() -> Option<Self> {
        if !capability::fuse() || !capability::program("python3") || !capability::program("taskset") {
            return None;
        }
        let alone = ONE_AT_A_TIME.lock();
        let all = affinity(Path::new("/proc/self")).unwrap();
        if !all.contains(['-', ',']) {
            eprintln!("SKIPPED: this test needs two processors");
            assert!(std::env::var_os("CI").is_none(), "CI must be able to run this");
            return None;
        }
        let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(256 << 20));
        ubtrfs_mkfs::make(device.as_ref(), &ubtrfs_mkfs::MkfsOptions::default()).unwrap();
        let fs = Fs::open(vec![device], MountOptions { track_lookups: true, ..MountOptions::default() }).unwrap();
        let dir = TempDir::with_prefix("ubtrfs-placement-").unwrap();
        let config = MountConfig { transport: Transport::DevFuse, ..MountConfig::default() };
        let session = Session::mount(fs, dir.path(), &config).unwrap();
        let server = std::thread::spawn(move || session.run());
        Some(Self { dir, server: Some(server), all, _alone: alone })
    }

    /// Starts a program that makes requests which the kernel does not answer itself, for the given time.
    fn client(&self, seconds: f32) -> Child {
        let program = "import os, sys, time\nend = time.time() + float(sys.argv[1])\n\
                       while time.time() < end:\n for _ in range(100): os.statvfs('.')";
        let mut command = Command::new("python3");
        command.args(["-c", program, &seconds.to_string()]).current_dir(self.dir.path()).spawn().unwrap()
    }

    /// Whether some threads are gathered. Runs `look` before each look, until a client has ended.
    fn gathers(&self, mut client: Child, mut look: impl FnMut()) -> bool {
        let mut gathers = false;
        while client.try_wait().unwrap().is_none() {
            look();
            gathers |= threads().iter().any(|thread| affinity(thread).is_some_and(|own| own != self.all));
            std::thread::sleep(Duration::from_millis(1));
        }
        gathers
    }

    /// How long it takes until all threads may run on these processors.
    #[track_caller]
    fn time_until_all_are_on(&self, processors: &str) -> Duration {
        let began = Instant::now();
        loop {
            let places: Vec<_> = threads().iter().filter_map(|thread| affinity(thread)).collect();
            if places.iter().all(|own| own == processors) {
                return began.elapsed();
            }
            assert!(began.elapsed() < Duration::from_secs(5), "{places:?}, not {processors}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = taskset(&self.all);
        ubtrfs_fuse::unmount(self.dir.path(), false).unwrap();
        self.server.take().unwrap().join().unwrap().unwrap();
    }
}

/// The directories in /proc of the threads that read /dev/fuse.
fn threads() -> Vec<PathBuf> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten().map(|task| task.path());
    let is_reader = |path: &PathBuf| std::fs::read_to_string(path.join("comm")).is_ok_and(|name| name == "fuse\n");
    tasks.filter(is_reader).collect()
}

/// Where a process or thread may run; `None` if it has ended.
fn affinity(process: &Path) -> Option<String> {
    let status = std::fs::read_to_string(process.join("status")).ok()?;
    Some(status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?.trim().to_owned())
}

/// The processor on which a thread ran last.
fn processor(thread: &Path) -> Option<String> {
    let stat = std::fs::read_to_string(thread.join("stat")).ok()?;
    Some(stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(36)?.to_owned())
}

/// Sets the processors of all threads of this process. Repeats it if a thread of another test ends meanwhile.
fn taskset(processors: &str) -> bool {
    let pid = std::process::id().to_string();
    let set = || {
        let output = Command::new("taskset").args(["-a", "-c", "-p", processors, &pid]).output();
        output.is_ok_and(|output| output.status.success())
    };
    (0..50).any(|_| set())
}

#[test]
fn threads_gather_for_a_lone_client_and_are_spread_when_its_requests_stop() {
    let Some(served) = Served::new() else { return };
    // On a busy machine, requests may be too sparse.
    assert!((0..20).any(|_| served.gathers(served.client(0.5), || {})), "never gathered");
    let took = served.time_until_all_are_on(&served.all);
    assert!(took < Duration::from_secs(1), "spread {took:?} after the last request");
}

#[test]
fn many_clients_use_all_processors() {
    let Some(served) = Served::new() else { return };
    let clients: Vec<Child> = (0..8).map(|_| served.client(1.5)).collect();
    let mut used = BTreeSet::new();
    for client in clients {
        served.gathers(client, || used.extend(threads().iter().filter_map(|thread| processor(thread))));
    }
    assert!(used.len() > 1, "all requests were served on {used:?}");
    served.time_until_all_are_on(&served.all);
}

#[test]
fn threads_stay_on_the_processors_that_the_process_was_given_while_it_served() {
    let Some(served) = Served::new() else { return };
    let first: String = served.all.chars().take_while(char::is_ascii_digit).collect();
    for _ in 0..20 {
        let mut looks = 0;
        let narrows = || {
            looks += 1;
            if looks == 200 {
                assert!(taskset(&first));
            }
        };
        let has_gathered = served.gathers(served.client(0.6), narrows);
        assert!(looks > 200 || taskset(&first));
        std::thread::sleep(Duration::from_millis(200));
        served.time_until_all_are_on(&first);
        // Steps aside and back do not widen the processors either.
        let file = std::fs::File::create(served.dir.path().join("file")).unwrap();
        (0..20).for_each(|_| file.sync_all().unwrap());
        served.time_until_all_are_on(&first);
        assert!(taskset(&served.all));
        if has_gathered {
            return;
        }
    }
    panic!("never gathered");
}
