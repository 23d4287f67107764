//! Tests the memory that requests of users take: the highest resident memory of a mount's server stays within
//! `--memory`, whatever users send.
//!
//! Method: an ordinary user makes content that is as bad as possible: deep and wide directories with long names, many
//! attributes, extents, references, links and subvolumes. Then the user sends every request in its worst form, alone and
//! eight at once, and some requests without reading the answers. Root sends the requests that only root may send. The
//! requests are in `programs/worst_requests.py`.
//!
//! `WORST_REQUESTS_SCALE=1 cargo test -p ubtrfs-cli --test it worst_requests` runs the test at scale: 3000 directories
//! inside each other, 2000 subvolumes. Without the variable, the content is a tenth of that. With
//! `WORST_REQUESTS_MEMORY`, the limit is that number of MiB.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use crate::common::{ok, server_of, text, ubtrfs};

/// The smallest limit that a server keeps, in MiB, as `mount --help` says.
const LEAST_MIB: u64 = 144;
const NOBODY: u32 = 65534;
const PROGRAM: &str = include_str!("programs/worst_requests.py");

fn number<T: std::str::FromStr>(name: &str, default: T) -> T {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// The highest resident memory of a process so far, in MiB.
fn peak_mib(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let found = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    found.split_whitespace().next().unwrap().parse::<u64>().unwrap() >> 10
}

fn python(mount: &Path, scale: f64, phase: &str, user: u32) {
    let mut command = Command::new("python3");
    command.args(["-c", PROGRAM]).arg(mount).args([&scale.to_string(), phase, &user.to_string()]);
    let output = command.output().unwrap();
    print!("{}", String::from_utf8_lossy(&output.stdout));
    assert!(output.status.success(), "{phase}: {}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn no_request_of_a_user_takes_more_memory_than_the_server_may_use() {
    if !rustix::process::geteuid().is_root() || !Path::new("/dev/fuse").exists() {
        assert!(std::env::var_os("CI").is_none(), "this test needs root and FUSE");
        eprintln!("skipped: this test needs root and FUSE");
        return;
    }
    let (scale, memory) = (number("WORST_REQUESTS_SCALE", 0.1), number("WORST_REQUESTS_MEMORY", LEAST_MIB));
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let (image, mount) = (dir.path().join("image"), dir.path().join("mount"));
    fs::create_dir(&mount).unwrap();
    let limit = format!("{memory}M");
    let start = || {
        let args = ["mount", "--memory", &limit, "-o", "user_subvol_rm_allowed", &text(&image), &text(&mount)];
        ok(ubtrfs(args));
        server_of(&mount)
    };
    ok(ubtrfs(["mkfs", "-q", "-b", "64G", &text(&image)]));
    let mut peaks = Vec::new();
    let mut pid = start();
    fs::create_dir(mount.join("user")).unwrap();
    std::os::unix::fs::chown(mount.join("user"), Some(NOBODY), Some(NOBODY)).unwrap();
    for (phase, user) in [("make", NOBODY), ("requests", NOBODY), ("calls", NOBODY), ("root", 0)] {
        python(&mount, scale, phase, user);
        let peak = peak_mib(pid);
        println!("{phase}: at most {peak} MiB of {memory}");
        peaks.push((phase, peak));
        // Each phase has a server of its own, so that its peak is known.
        ok(ubtrfs(["umount", &text(&mount)]));
        pid = start();
    }
    ok(ubtrfs(["umount", &text(&mount)]));
    ok(ubtrfs(["check", &text(&image)]));
    for (phase, peak) in peaks {
        assert!(peak <= memory.max(LEAST_MIB), "{phase}: the server took {peak} MiB of {memory}");
    }
}
