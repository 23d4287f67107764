//! Tests of the limits of a confined process. Method: the test runs itself again as a child, which confines itself,
//! tries allowed and forbidden operations, and prints the results.

use std::fs::File;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Command;

use ubtrfs_fuse::Identity;

const CHILD: &str = "UBTRFS_SANDBOX_TEST_CHILD";

#[test]
fn a_confined_process_serves_and_does_nothing_else() {
    if std::env::var_os(CHILD).is_some() {
        return child();
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "sandbox::a_confined_process_serves_and_does_nothing_else",
            "--nocapture",
            "--test-threads=1",
        ])
        .env(CHILD, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    println!("{text}{}", String::from_utf8_lossy(&output.stderr));
    if text.contains("not confined") {
        assert!(std::env::var_os("CI").is_none(), "CI needs seccomp and Landlock");
        eprintln!("SKIPPED: this test needs seccomp and Landlock");
        return;
    }
    for line in [
        "open: denied",
        "create: denied",
        "network socket: denied",
        "unix socket: denied",
        "program: denied",
        "other thread opens: denied",
        "signal to another: denied",
        "ioctl: denied",
        "new thread opens: denied",
        "reads and writes what is open",
        "starts threads",
        "allocates",
    ] {
        assert!(text.contains(line), "{line}?\n{text}");
    }
}

/// User ids, group ids, groups, capabilities (permitted, effective, ambient) and `NoNewPrivs`, as the `status` file of
/// a thread in /proc shows them.
fn rights(status: &File) -> String {
    let mut text = vec![0; 8192];
    let len = status.read_at(&mut text, 0).unwrap();
    let text = String::from_utf8(text[..len].to_vec()).unwrap();
    let names = ["Uid", "Gid", "Groups", "CapPrm", "CapEff", "CapAmb", "NoNewPrivs"];
    let value = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.unwrap().split_whitespace().collect::<Vec<_>>().join(" ")
    };
    names.map(value).join("/")
}

fn child() {
    let was_root = rustix::process::getuid().is_root();
    let parent = rustix::process::getppid().unwrap();
    let path = std::env::temp_dir().join(format!("ubtrfs-sandbox-{}", std::process::id()));
    let scratch = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let (mut near, mut far) = UnixStream::pair().unwrap();
    let (go, wait) = std::sync::mpsc::channel();
    let status = std::fs::File::open("/proc/self/status").unwrap();
    let before = std::thread::spawn(move || {
        let status = std::fs::File::open("/proc/thread-self/status").unwrap();
        wait.recv().unwrap();
        (File::open("/etc/passwd").is_err(), rights(&status))
    });
    let done = ubtrfs_fuse::confine(Identity { uid: 4321, gid: 4322 });
    assert!(done.unprivileged, "{done:?}");
    if !done.seccomp || !done.landlock {
        println!("not confined: {done:?}");
        return;
    }
    let say = |what: &str, denied: bool| println!("{what}: {}", if denied { "denied" } else { "ALLOWED" });
    say("open", File::open("/etc/passwd").is_err());
    say("create", File::create("/tmp/ubtrfs-sandbox-test").is_err());
    say("network socket", TcpListener::bind("127.0.0.1:0").is_err());
    say("unix socket", UnixListener::bind("/tmp/ubtrfs-sandbox-test.socket").is_err());
    say("program", Command::new("/bin/true").status().is_err());
    go.send(()).unwrap();
    let (denied, other) = before.join().unwrap();
    say("other thread opens", denied);
    say("signal to another", rustix::process::test_kill_process(parent).is_err());
    // Like TIOCSTI and TIOCLINUX, this ioctl is not among the ioctls that the filter allows.
    say("ioctl", rustix::io::ioctl_fionread(&near) == Err(rustix::io::Errno::PERM));
    near.set_nonblocking(true).unwrap();
    near.set_nonblocking(false).unwrap();
    for rights in [rights(&status), other] {
        println!("{rights}");
        if was_root {
            assert!(rights.starts_with("4321 4321 4321 4321/4322 4322 4322 4322//"), "{rights}");
        }
        assert!(rights.ends_with("/0000000000000000/0000000000000000/0000000000000000/1"), "{rights}");
    }
    let after = std::thread::spawn(|| File::open("/etc/passwd").is_err());
    println!("starts threads");
    say("new thread opens", after.join().unwrap());
    scratch.write_all_at(&[7; 8192], 4096).unwrap();
    scratch.sync_data().unwrap();
    let mut back = [0; 8192];
    scratch.read_exact_at(&mut back, 4096).unwrap();
    near.write_all(b"x").unwrap();
    far.read_exact(&mut back[..1]).unwrap();
    assert_eq!(back[1], 7);
    println!("reads and writes what is open");
    let big = vec![1u8; 64 << 20];
    drop(big);
    println!("allocates");
}
