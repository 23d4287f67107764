//! Tests the memory that requests of users take: the highest resident memory of a mount's server stays within
//! `--memory`, whatever users send.
//!
//! Method: an ordinary user makes content that is as bad as possible: deep and wide directories with long names, many
//! attributes, extents, references, links and subvolumes. Then the user sends every request in its worst form, alone and
//! eight at once, and some requests without reading the answers. Root sends the requests that only root may send. The
//! requests are in `programs/worst_requests.py`.
//!
//! [`CONTROL`] and [`FUSE`] list all requests that a server knows. A request that is in no list does not compile. After
//! the last phase, each request of the lists was sent, or the list gives a reason. The ioctls are those in the sources
//! of crate `fuse`.
//!
//! `WORST_REQUESTS_SCALE=1 cargo test -p ubtrfs-cli --test it worst_requests` runs the test at scale: 3000 directories
//! inside each other, 2000 subvolumes. Without the variable, the content is a tenth of that. With
//! `WORST_REQUESTS_MEMORY`, the limit is that number of MiB.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use ubtrfs_control::{
    Request, balance, device, file, filesystem, join, quota, replace, resolve, scrub, search, send, subvolume,
};
use ubtrfs_fuse::protocol::Operation;

use crate::common::{ok, server_of, text, ubtrfs};

/// A list of all variants of an enum, with a value for each. Does not compile if a variant is missing.
macro_rules! all_variants {
    ($(#[$doc:meta])* const $name:ident: &[$value:ty] for $of:ty { $($variant:pat => $entry:expr,)+ }) => {
        $(#[$doc])*
        const $name: &[$value] = &[$($entry),+];
        const _: fn(&$of) = |of| match of {
            $($variant => {})+
        };
    };
}

all_variants! {
    /// The control requests, as the program names them.
    const CONTROL: &[&str] for Request {
        Request::Subvolume(subvolume::Request::Info { .. }) => "subvolume.info",
        Request::Subvolume(subvolume::Request::List { .. }) => "subvolume.list",
        Request::Subvolume(subvolume::Request::ListDeleted { .. }) => "subvolume.list_deleted",
        Request::Subvolume(subvolume::Request::Create { .. }) => "subvolume.create",
        Request::Subvolume(subvolume::Request::Snapshot { .. }) => "subvolume.snapshot",
        Request::Subvolume(subvolume::Request::Delete { .. }) => "subvolume.delete",
        Request::Subvolume(subvolume::Request::DeleteById { .. }) => "subvolume.delete_by_id",
        Request::Subvolume(subvolume::Request::SetReadOnly { .. }) => "subvolume.set_read_only",
        Request::Subvolume(subvolume::Request::SetReceived { .. }) => "subvolume.set_received",
        Request::Subvolume(subvolume::Request::Default) => "subvolume.default",
        Request::Subvolume(subvolume::Request::SetDefault { .. }) => "subvolume.set_default",
        Request::Subvolume(subvolume::Request::Sync) => "subvolume.sync",
        Request::Filesystem(filesystem::Request::Sync) => "filesystem.sync",
        Request::Filesystem(filesystem::Request::Stats) => "filesystem.stats",
        Request::Filesystem(filesystem::Request::Info) => "filesystem.info",
        Request::Filesystem(filesystem::Request::Usage) => "filesystem.usage",
        Request::Filesystem(filesystem::Request::MountOptions) => "filesystem.mount_options",
        Request::Filesystem(filesystem::Request::SetLabel { .. }) => "filesystem.set_label",
        Request::Filesystem(filesystem::Request::ChangeOptions { .. }) => "filesystem.change_options",
        Request::Filesystem(filesystem::Request::Trim { .. }) => "filesystem.trim",
        Request::Device(device::Request::Resize { .. }) => "device.resize",
        Request::Device(device::Request::MinSize { .. }) => "device.min_size",
        Request::Device(device::Request::CancelResize) => "device.cancel_resize",
        Request::Device(device::Request::Add(_)) => "device.add",
        Request::Device(device::Request::Remove { .. }) => "device.remove",
        Request::Device(device::Request::CancelRemoval) => "device.cancel_removal",
        Request::Device(device::Request::Stats) => "device.stats",
        Request::Device(device::Request::ResetStats { .. }) => "device.reset_stats",
        Request::Defragment(_) => "defragment",
        Request::DiskUsage(_) => "disk_usage",
        Request::Balance(balance::Request::Start(_)) => "balance.start",
        Request::Balance(balance::Request::Resume) => "balance.resume",
        Request::Balance(balance::Request::Pause) => "balance.pause",
        Request::Balance(balance::Request::Cancel) => "balance.cancel",
        Request::Balance(balance::Request::Status) => "balance.status",
        Request::Scrub(scrub::Request::Start(_)) => "scrub.start",
        Request::Scrub(scrub::Request::Cancel) => "scrub.cancel",
        Request::Scrub(scrub::Request::Status) => "scrub.status",
        Request::Scrub(scrub::Request::Limit { .. }) => "scrub.limit",
        Request::Search(search::Request::Items(_)) => "search.items",
        Request::Search(search::Request::Path { .. }) => "search.path",
        Request::Search(search::Request::Children { .. }) => "search.children",
        Request::Search(search::Request::Child { .. }) => "search.child",
        Request::File(file::Request::Extents { .. }) => "file.extents",
        Request::File(file::Request::Clone(_)) => "file.clone",
        Request::File(file::Request::Compression { .. }) => "file.compression",
        Request::File(file::Request::SetCompression { .. }) => "file.set_compression",
        Request::File(file::Request::Dedupe(_)) => "file.dedupe",
        Request::Quota(quota::Request::Enable { .. }) => "quota.enable",
        Request::Quota(quota::Request::Disable) => "quota.disable",
        Request::Quota(quota::Request::Status) => "quota.status",
        Request::Quota(quota::Request::Rescan) => "quota.rescan",
        Request::Quota(quota::Request::RescanWait) => "quota.rescan_wait",
        Request::Quota(quota::Request::Groups { .. }) => "quota.groups",
        Request::Quota(quota::Request::Create { .. }) => "quota.create",
        Request::Quota(quota::Request::Destroy { .. }) => "quota.destroy",
        Request::Quota(quota::Request::ClearStale) => "quota.clear_stale",
        Request::Quota(quota::Request::Assign { .. }) => "quota.assign",
        Request::Quota(quota::Request::Remove { .. }) => "quota.remove",
        Request::Quota(quota::Request::Limit { .. }) => "quota.limit",
        Request::Resolve(resolve::Request::Logical { .. }) => "resolve.logical",
        Request::Resolve(resolve::Request::LogicalInodes { .. }) => "resolve.logical_inodes",
        Request::Resolve(resolve::Request::Inode { .. }) => "resolve.inode",
        Request::Resolve(resolve::Request::Subvolume { .. }) => "resolve.subvolume",
        Request::Resolve(resolve::Request::RootId { .. }) => "resolve.root_id",
        Request::Replace(replace::Request::Start(_)) => "replace.start",
        Request::Replace(replace::Request::Resume) => "replace.resume",
        Request::Replace(replace::Request::Status) => "replace.status",
        Request::Replace(replace::Request::Cancel) => "replace.cancel",
        Request::Receive(_) => "receive",
        Request::Send(send::Request::Send(_)) => "send.send",
        Request::Send(send::Request::Diff { .. }) => "send.diff",
        Request::Send(send::Request::FindNew { .. }) => "send.find_new",
        Request::Join(join::Request::Find { .. }) => "join.find",
        Request::Join(join::Request::Joined { .. }) => "join.joined",
        Request::Join(join::Request::Mounts) => "join.mounts",
        Request::Join(join::Request::LeaveSubmounts) => "join.leave_submounts",
        Request::AwaitUnmount => "await_unmount",
    }
}

/// How the bed gets the kernel to send a FUSE request.
enum Fuse {
    /// As one of these opcodes, which statistics count.
    As(&'static [&'static str]),
    /// The bed cannot, for this reason.
    Not(&'static str),
}

all_variants! {
    /// The FUSE requests.
    const FUSE: &[Fuse] for Operation<'_> {
        Operation::Lookup { .. } => Fuse::As(&["lookup"]),
        Operation::Getattr => Fuse::As(&["getattr"]),
        Operation::Statx => Fuse::As(&["statx"]),
        Operation::Setattr(_) => Fuse::As(&["setattr"]),
        Operation::Readlink => Fuse::As(&["readlink"]),
        Operation::Symlink { .. } => Fuse::As(&["symlink"]),
        Operation::Mknod { .. } => Fuse::As(&["mknod"]),
        Operation::Mkdir { .. } => Fuse::As(&["mkdir"]),
        Operation::Unlink { .. } => Fuse::As(&["unlink"]),
        Operation::Rmdir { .. } => Fuse::As(&["rmdir"]),
        Operation::Rename { .. } => Fuse::As(&["rename", "rename2"]),
        Operation::Link { .. } => Fuse::As(&["link"]),
        Operation::Open { .. } => Fuse::As(&["open"]),
        Operation::Read { .. } => Fuse::As(&["read"]),
        Operation::Write { .. } => Fuse::As(&["write"]),
        Operation::Statfs => Fuse::As(&["statfs"]),
        Operation::Release { .. } => Fuse::As(&["release"]),
        Operation::Fsync { .. } => Fuse::As(&["fsync"]),
        Operation::Fsyncdir { .. } => Fuse::As(&["fsyncdir"]),
        Operation::Syncfs => Fuse::Not("only mounts of type fuseblk get it, and it has no content"),
        Operation::Setxattr { .. } => Fuse::As(&["setxattr"]),
        Operation::Getxattr { .. } => Fuse::As(&["getxattr"]),
        Operation::Listxattr { .. } => Fuse::As(&["listxattr"]),
        Operation::Removexattr { .. } => Fuse::As(&["removexattr"]),
        Operation::Readdir { .. } => Fuse::As(&["readdir", "readdirplus"]),
        Operation::Readdirplus { .. } => Fuse::As(&["readdirplus"]),
        Operation::Create { .. } => Fuse::As(&["create"]),
        Operation::Tmpfile { .. } => Fuse::As(&["tmpfile"]),
        Operation::Ioctl { .. } => Fuse::As(&["ioctl"]),
        Operation::Fallocate { .. } => Fuse::As(&["fallocate"]),
        Operation::Lseek { .. } => Fuse::As(&["lseek"]),
        Operation::CopyFileRange { .. } => Fuse::As(&["copy_file_range", "copy_file_range_64"]),
        Operation::Interrupt { .. } => Fuse::Not("it has no answer, so it is not counted, and holds one number"),
        Operation::Other(_) => Fuse::Not("it is refused unread"),
    }
}

/// The numbers of the ioctls in the sources of crate `fuse`.
fn ioctls_of_the_server() -> BTreeSet<String> {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuse/src");
    let mut found = BTreeSet::new();
    for file in ["ioctl.rs", "btrfs_ioctl.rs", "admin_ioctl.rs", "subvolume_ioctl.rs"] {
        let text = fs::read_to_string(sources.join(file)).unwrap();
        let numbers =
            text.lines().filter_map(|line| line.strip_prefix("const ")?.strip_suffix(';')?.split_once(": u32 = 0x"));
        let numbers = numbers.map(|(_, hex)| u32::from_str_radix(&hex.replace('_', ""), 16).unwrap());
        // Smaller numbers are flags.
        found.extend(numbers.filter(|number| *number > 0xff).map(|number| format!("{number:#x}")));
    }
    found
}

/// The smallest limit that a server keeps, in MiB, as `mount --help` says.
const LEAST_MIB: u64 = 144;
/// What large work of root, such as a balance beside sends and receives, may take above the limit (docs/guide/tuning.md).
const ROOT_MORE_MIB: u64 = 48;
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

/// Runs a phase of the program, and returns what it sent.
fn python(mount: &Path, scale: f64, phase: &str, user: u32, server: u32, devices: &[PathBuf]) -> BTreeSet<String> {
    let mut command = Command::new("python3");
    command
        .args(["-c", PROGRAM])
        .arg(mount)
        .args([&scale.to_string(), phase, &user.to_string(), &server.to_string()])
        .args(devices);
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    print!("{said}");
    assert!(output.status.success(), "{phase}: {}", String::from_utf8_lossy(&output.stderr));
    let sent = said.lines().find_map(|line| line.strip_prefix("sent:")).unwrap();
    sent.split_whitespace().map(str::to_owned).collect()
}

/// The FUSE requests that a server counted so far.
fn counted(mount: &Path) -> BTreeSet<String> {
    let stats = ok(ubtrfs(["stats", "--prometheus", &text(mount)]));
    let of = |line: &str| Some(line.split_once("fuse_requests_total{opcode=\"")?.1.split_once('"')?.0.to_owned());
    stats.lines().filter_map(of).collect()
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
    let devices = ["second", "third"].map(|name| dir.path().join(name));
    for device in &devices {
        fs::File::create(device).unwrap().set_len(64 << 30).unwrap();
    }
    let (mut peaks, mut sent_by_user, mut requested) = (Vec::new(), BTreeSet::new(), BTreeSet::new());
    let mut pid = start();
    fs::create_dir(mount.join("user")).unwrap();
    std::os::unix::fs::chown(mount.join("user"), Some(NOBODY), Some(NOBODY)).unwrap();
    for (phase, user) in [("make", NOBODY), ("requests", NOBODY), ("calls", NOBODY), ("root", 0)] {
        let sent = python(&mount, scale, phase, user, pid, &devices);
        if user == NOBODY {
            sent_by_user.extend(sent);
        }
        let peak = peak_mib(pid);
        println!("{phase}: at most {peak} MiB of {memory}");
        peaks.push((phase, peak));
        requested.extend(counted(&mount));
        // Each phase has a server of its own, so that its peak is known.
        ok(ubtrfs(["umount", &text(&mount)]));
        pid = start();
    }
    ok(ubtrfs(["umount", &text(&mount)]));
    ok(ubtrfs(["check", &text(&image)]));
    for (phase, peak) in peaks {
        let most = memory.max(LEAST_MIB) + if phase == "root" { ROOT_MORE_MIB } else { 0 };
        assert!(peak <= most, "{phase}: the server took {peak} MiB of {memory}");
    }
    for name in CONTROL {
        assert!(sent_by_user.contains(*name), "programs/worst_requests.py does not send {name}");
    }
    for entry in FUSE {
        match entry {
            Fuse::As(names) => assert!(names.iter().any(|name| requested.contains(*name)), "{names:?}: {requested:?}"),
            Fuse::Not(reason) => println!("not sent: {reason}"),
        }
    }
}

/// Needs neither root nor FUSE.
#[test]
fn every_ioctl_of_the_server_is_in_the_list() {
    let ioctls = ioctls_of_the_server();
    assert!(ioctls.len() > 30, "the numbers are not found: {ioctls:?}");
    for number in ioctls {
        assert!(PROGRAM.contains(&number), "programs/worst_requests.py does not send ioctl {number}");
    }
}
