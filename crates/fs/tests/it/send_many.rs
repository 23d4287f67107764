//! Sends extents with hundreds of references, inodes with hundreds of names, and deep directories, and compares what is
//! received: trees, holes, and the sharing of each block.

use std::sync::Arc;

use ubtrfs_device::Device;
use ubtrfs_format::RootId;
use ubtrfs_fs::{
    Caller, FallocateMode, Fs, InodeId, Job, MountOptions, NewInode, ReceiveOptions, RenameFlags, SendRequest,
};
use ubtrfs_mkfs::MkfsOptions;
use ubtrfs_testkit::send::{Sent, Tolerance, compare_extents};
use ubtrfs_testkit::{Compare, Medium, MediumDevice, compare_entries, walk_fs_from};

fn filesystem() -> Arc<Fs> {
    let medium = Medium::formatted(512 << 20, &MkfsOptions::default()).unwrap();
    let device: Arc<dyn Device> = Arc::new(MediumDevice::new(medium));
    Fs::open(vec![device], MountOptions::default()).unwrap()
}

fn root(fs: &Fs, name: &str) -> RootId {
    fs.subvolumes().unwrap().into_iter().find(|info| info.path == name.as_bytes()).unwrap().id
}

fn live(fs: &Fs) -> InodeId {
    fs.create_subvolume(fs.root(), b"live", &Caller::ROOT).unwrap();
    InodeId::root_of(root(fs, "live"))
}

fn file(fs: &Fs, dir: InodeId, name: &str) -> InodeId {
    fs.create(dir, name.as_bytes(), NewInode::file(0o644), &Caller::ROOT).unwrap().id
}

fn dir(fs: &Fs, above: InodeId, name: &str) -> InodeId {
    fs.create(above, name.as_bytes(), NewInode::dir(0o755), &Caller::ROOT).unwrap().id
}

fn snapshot(fs: &Fs, name: &str) {
    fs.snapshot_in(root(fs, "live"), fs.root(), name.as_bytes(), true, &[]).unwrap();
}

/// Sends `s0` whole and `s1` as an increment, and compares both with what another filesystem receives. Returns the
/// lengths of the streams.
fn check(fs: &Fs) -> [usize; 2] {
    check_in(2, fs)
}

/// As [`check`], with streams of this version.
fn check_in(version: u32, fs: &Fs) -> [usize; 2] {
    let receiver = filesystem();
    let lens = [("s0", None), ("s1", Some("s0"))].map(|(name, parent)| {
        let request = SendRequest {
            subvolumes: vec![root(fs, name)],
            parent: parent.map(|parent| root(fs, parent)),
            clone_sources: Vec::new(),
            version,
            compressed_data: false,
            no_data: false,
            joined: false,
        };
        let mut stream = Vec::new();
        fs.send(&request, &mut stream, &Job::new()).unwrap();
        receiver.receive(receiver.root(), &stream[..], &ReceiveOptions::default(), &Job::new(), &mut |_| {}).unwrap();
        let walk = |fs: &Fs| walk_fs_from(fs, InodeId::root_of(root(fs, name))).unwrap();
        compare_entries(&walk(fs), &walk(&receiver), Compare::ALL).unwrap();
        stream.len()
    });
    let tolerance = Tolerance { prealloc: false, tails: false, ends: false };
    let sent = [("s0", vec![]), ("s1", vec!["s0"])].map(|(name, others)| Sent { name, others, tolerance });
    let differs = compare_extents(fs, &receiver, &sent).unwrap();
    assert!(!differs.is_any(), "{differs:?}");
    lens
}

#[test]
fn an_extent_of_many_files_is_sent_once() {
    let fs = filesystem();
    let live = live(&fs);
    let data: Vec<u8> = (0..256 << 10).map(|at: u32| (at >> 3) as u8 ^ (at >> 11) as u8).collect();
    let len = data.len() as u64;
    let first = file(&fs, live, "first");
    fs.write(first, 0, &data).unwrap();
    fs.sync().unwrap();
    let clones = |dir: InodeId, count: u64| {
        for number in 0..count {
            let clone = file(&fs, dir, &format!("clone-{number}"));
            // Some clones are of a part, and some lie elsewhere in their file.
            let (from, to) = ([0, 64 << 10][number as usize % 2], [0, 1 << 20][number as usize / 2 % 2]);
            fs.clone_range(first, from, clone, to, len - from).unwrap();
        }
    };
    clones(live, 400);
    snapshot(&fs, "s0");
    clones(dir(&fs, live, "more"), 400);
    // The file whose data was cloned is gone, so the increment clones from other files that share the data.
    fs.unlink(live, b"first").unwrap();
    snapshot(&fs, "s1");
    let [whole, increment] = check(&fs);
    assert!(whole < data.len() + 200_000 && increment < 200_000, "{whole} and {increment} bytes");
}

#[test]
fn many_names_and_deep_directories_arrive() {
    let fs = filesystem();
    let live = live(&fs);
    let linked = file(&fs, live, "linked");
    fs.write(linked, 0, &[7; 5000]).unwrap();
    let dirs = ["a", "b"].map(|name| dir(&fs, live, name));
    let name_of = |number: usize| format!("{number:0>120}");
    for number in 0..600 {
        fs.link(linked, dirs[number % 2], name_of(number).as_bytes()).unwrap();
    }
    // The longest paths have nearly 4,000 bytes.
    let mut chain = vec![dir(&fs, live, "deep")];
    for depth in 0..60 {
        let next = dir(&fs, chain[depth], &format!("{depth:0>60}"));
        file(&fs, next, "file");
        chain.push(next);
    }
    snapshot(&fs, "s0");
    for number in 0..600 {
        let (from, name) = (dirs[number % 2], name_of(number));
        match number % 5 {
            0 => fs.unlink(from, name.as_bytes()).unwrap(),
            1 => {
                let to = dirs[(number + 1) % 2];
                fs.rename(from, name.as_bytes(), to, name.as_bytes(), RenameFlags::empty()).unwrap();
            }
            _ => {}
        }
    }
    // Swap the halves of the chain of directories: the lower half moves up into `live`, the upper half below the lower
    // one.
    let (upper, lower) = (format!("{:0>60}", 0), format!("{:0>60}", 30));
    fs.rename(chain[30], lower.as_bytes(), live, b"lower", RenameFlags::empty()).unwrap();
    fs.rename(chain[0], upper.as_bytes(), chain[40], b"upper", RenameFlags::empty()).unwrap();
    fs.link(linked, chain[45], b"deep link").unwrap();
    snapshot(&fs, "s1");
    check(&fs);
}

#[test]
fn more_holes_than_wait_at_once_arrive_in_version_1() {
    let fs = filesystem();
    let live = live(&fs);
    let holed = file(&fs, live, "holed");
    // The last sector is a part, so its clones depend on the size of the file.
    let len = 18_000 * 4096 - 1000;
    let data: Vec<u8> = (0..len).map(|at: u64| (at >> 9) as u8).collect();
    fs.write_all(holed, 0, &data).unwrap();
    snapshot(&fs, "s0");
    let punch = FallocateMode::PUNCH_HOLE | FallocateMode::KEEP_SIZE;
    for sector in (1..17_999).step_by(2) {
        fs.fallocate(holed, sector * 4096, 4096, punch).unwrap();
    }
    fs.write(holed, 12_000 * 4096, &[1; 4096]).unwrap();
    snapshot(&fs, "s1");
    let [_, increment] = check_in(1, &fs);
    assert!(increment < 2_000_000, "{increment} bytes");
}
