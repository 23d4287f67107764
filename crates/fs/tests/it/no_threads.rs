//! Tests of a system that starts no more threads, as at the limit of processes of a container.
//!
//! Method: a test runs this program once more, as the user nobody, whom the limit binds. That one sets its limit to no
//! processes, before or after it opens the filesystem, and works. The first one checks the images that are left.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;

use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, setrlimit};
use ubtrfs_device::Device;
use ubtrfs_format::item::{BalanceArgs, BalanceFlags, BalanceItem};
use ubtrfs_format::{Ino, RootId};
use ubtrfs_fs::{Caller, Fs, InodeId, Job, MountOptions, NewInode, ScrubStart, SendRequest};
use ubtrfs_mkfs::MkfsOptions;
use ubtrfs_testkit::{Medium, MediumDevice, btrfs_check_array, capability};

const TOP: InodeId = InodeId { root: RootId::FS_TREE, ino: Ino::ROOT_DIR };
/// Says to the second run when it sets its limit.
const LIMITED: &str = "UBTRFS_TEST_LIMITED";

#[test]
fn a_filesystem_works_if_the_system_starts_no_threads() {
    if !capability::root() {
        return;
    }
    // The user nobody may not reach the folder of this program.
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    let program = dir.path().join("program");
    std::fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    for when in ["before", "after"] {
        let mut command = std::process::Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(&program);
        command
            .args(["--exact", "no_threads::work_as_nobody", "--nocapture"])
            .current_dir(dir.path())
            .env(LIMITED, when);
        let output = command.output().unwrap();
        let text = [&output.stdout[..], &output.stderr].concat();
        assert!(output.status.success(), "{when}: {}", String::from_utf8_lossy(&text));
        let images = [dir.path().join("image0"), dir.path().join("image1")];
        btrfs_check_array(&images).unwrap();
        images.iter().for_each(|image| std::fs::remove_file(image).unwrap());
    }
}

/// The second run. Does nothing in the first one.
#[test]
fn work_as_nobody() {
    let Ok(when) = std::env::var(LIMITED) else { return };
    let limit = || {
        setrlimit(Resource::Nproc, Rlimit { current: Some(0), maximum: Some(0) }).unwrap();
        assert!(std::thread::Builder::new().spawn(|| ()).is_err(), "the limit binds");
    };
    let devices: Vec<_> = (0..2).map(|_| Arc::new(MediumDevice::new(Medium::zeros(512 << 20)))).collect();
    let named: Vec<&dyn Device> = devices.iter().map(|device| &**device as &dyn Device).collect();
    ubtrfs_mkfs::make_array(&named, &MkfsOptions::default().with_array_profiles()).unwrap();
    let shared: Vec<Arc<dyn Device>> = devices.iter().map(|device| Arc::clone(device) as Arc<dyn Device>).collect();
    if when == "before" {
        limit();
    }
    let fs = Fs::open(shared.clone(), MountOptions::default()).unwrap();
    if when == "after" {
        limit();
    }
    let sv = fs.create_subvolume(TOP, b"sv", &Caller::ROOT).unwrap();
    for round in 0..3u8 {
        for number in 0..4000 {
            let name = format!("a name of some length {round} {number}");
            let file = fs.create(sv, name.as_bytes(), NewInode::file(0o644), &Caller::ROOT).unwrap().id;
            fs.write_all(file, 0, &[round; 5000]).unwrap();
        }
        fs.sync().unwrap();
    }
    let snapshot = fs.snapshot(sv.root, TOP, b"snapshot", true).unwrap();
    let request = SendRequest {
        subvolumes: vec![snapshot.root],
        parent: None,
        clone_sources: Vec::new(),
        version: 1,
        compressed_data: false,
        no_data: false,
        joined: false,
    };
    let sent = fs.send(&request, &mut std::io::sink(), &Job::new());
    assert_eq!(sent.map_err(|error| error.errno()), Err(Errno::AGAIN.raw_os_error()));
    let start = |devid| ScrubStart { devid, start: 0, limit: 0, io_priority: None };
    let starts: Vec<ScrubStart> = fs.space_usage().devices.iter().map(|device| start(device.devid)).collect();
    let scrub = fs.scrub(&starts, true, &Job::new()).unwrap();
    assert!(scrub.devices.iter().all(|device| device.result.is_ok()), "{scrub:?}");
    assert!(scrub.devices.iter().any(|device| device.counts.data_bytes_scrubbed > 0), "{scrub:?}");
    let everything = BalanceItem {
        flags: (BalanceFlags::DATA | BalanceFlags::METADATA).bits(),
        data: BalanceArgs::NONE,
        metadata: BalanceArgs::NONE,
        system: BalanceArgs::NONE,
        unused: [0; 4],
    };
    let moved = fs.balance(everything, &Job::new()).unwrap();
    assert!(moved.failures.is_empty(), "{moved:?}");
    fs.close().unwrap();
    drop(fs);
    for (number, device) in devices.iter().enumerate() {
        device.content().save(Path::new(&format!("image{number}"))).unwrap();
    }
}
