//! Tests images with external programs. Method: images with many combinations of options must pass `btrfs check` and
//! the kernel (mount through a loop device, write, scrub, unmount, check again), and must have the keys of images that
//! mkfs.btrfs makes with equal options. A test that cannot run prints SKIPPED; in CI it fails.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;
use ubtrfs_device::{Access, Device, FileDevice};
use ubtrfs_format::CsumType;
use ubtrfs_format::item::BlockGroupFlags;
use ubtrfs_format::superblock::{CompatRo, Incompat};
use ubtrfs_mkfs::{MkfsOptions, make};

const DUP: BlockGroupFlags = BlockGroupFlags::DUP;
const SINGLE: BlockGroupFlags = BlockGroupFlags::empty();
const MIB: u64 = 1 << 20;

fn run(program: &str, args: &[&str]) -> Result<String, String> {
    let output = Command::new(program).args(args).output().map_err(|error| format!("{program}: {error}"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    match output.status.success() {
        true => Ok(text(&output.stdout)),
        false => Err(format!("{program} {args:?}: {}\n{}", text(&output.stdout), text(&output.stderr))),
    }
}

/// Whether this test can run. If the test cannot run, prints the reason, and fails in CI.
fn available(what: &str, check: Result<String, String>) -> bool {
    if let Err(error) = &check {
        eprintln!("SKIPPED: {what} is not available: {error}");
        assert!(std::env::var_os("CI").is_none(), "CI must be able to run this");
    }
    check.is_ok()
}

fn has_progs() -> bool {
    available("btrfs-progs", run("btrfs", &["--version"]))
}

fn has_loop() -> bool {
    available(
        "a loop device with btrfs",
        run("losetup", &["-f"]).and_then(|_| {
            run("modinfo", &["btrfs"]).or_else(|_| {
                let known = std::fs::read_to_string("/proc/filesystems").unwrap_or_default();
                if known.contains("btrfs") { Ok(known) } else { Err("the kernel has no btrfs".to_owned()) }
            })
        }),
    )
}

/// Makes an image with this crate.
fn image(dir: &TempDir, len_bytes: u64, options: &MkfsOptions) -> PathBuf {
    let path = dir.path().join(format!("{}.img", options.fsid));
    let device = FileDevice::create(&path, len_bytes, true).unwrap();
    let report = make(&device, options).unwrap_or_else(|error| panic!("{options:?}: {error}"));
    assert_eq!(report.total_bytes, options.size_bytes.unwrap_or(len_bytes));
    path
}

fn check(path: &Path) {
    let text = run("btrfs", &["check", "--check-data-csum", path.to_str().unwrap()]).expect("btrfs check");
    assert!(text.contains("no error found"), "{text}");
}

/// The tested combinations: name, device size, options.
fn matrix() -> Vec<(&'static str, u64, MkfsOptions)> {
    let default = MkfsOptions::default;
    let incompat = default().incompat;
    let mixed = |profile| MkfsOptions {
        mixed: true,
        nodesize: 4096,
        data_profile: profile,
        metadata_profile: profile,
        ..default()
    };
    let bgt = default().compat_ro | CompatRo::BLOCK_GROUP_TREE;
    vec![
        ("default", 1024 * MIB, default()),
        ("default 109M", 109 * MIB, default()),
        ("default 300M", 300 * MIB, default()),
        ("default 20G", 20 << 30, default()),
        ("default 300G", 300 << 30, default()),
        ("label", 256 * MIB, MkfsOptions { label: "na\u{ef}ve label".into(), ..default() }),
        ("size", 1024 * MIB, MkfsOptions { size_bytes: Some(200 * MIB), ..default() }),
        ("odd size", 200 * MIB + 12345, MkfsOptions { size_bytes: Some(200 * MIB + 4096), ..default() }),
        ("single", 1024 * MIB, MkfsOptions { metadata_profile: SINGLE, ..default() }),
        ("dup data", 1024 * MIB, MkfsOptions { data_profile: DUP, ..default() }),
        (
            "dup data, single metadata",
            1024 * MIB,
            MkfsOptions { data_profile: DUP, metadata_profile: SINGLE, ..default() },
        ),
        ("mixed", 100 * MIB, mixed(SINGLE)),
        ("mixed dup", 1024 * MIB, mixed(DUP)),
        ("small", 28 * MIB, default()),
        ("small single", 15 * MIB, MkfsOptions { metadata_profile: SINGLE, ..default() }),
        ("small dup", 60 * MIB, MkfsOptions { data_profile: DUP, ..default() }),
        ("small mixed", 8 * MIB, mixed(SINGLE)),
        ("node 4K", 256 * MIB, MkfsOptions { nodesize: 4096, ..default() }),
        ("node 4K, block group tree", 256 * MIB, MkfsOptions { nodesize: 4096, compat_ro: bgt, ..default() }),
        (
            "node 4K, not skinny",
            256 * MIB,
            MkfsOptions { nodesize: 4096, incompat: incompat - Incompat::SKINNY_METADATA, ..default() },
        ),
        ("node 8K", 256 * MIB, MkfsOptions { nodesize: 8192, ..default() }),
        ("node 32K", 256 * MIB, MkfsOptions { nodesize: 32768, ..default() }),
        ("node 64K", 256 * MIB, MkfsOptions { nodesize: 65536, ..default() }),
        ("block group tree", 1024 * MIB, MkfsOptions { compat_ro: bgt, ..default() }),
        ("no free space tree", 256 * MIB, MkfsOptions { compat_ro: CompatRo::empty(), ..default() }),
        (
            "oldest features",
            256 * MIB,
            MkfsOptions { compat_ro: CompatRo::empty(), incompat: Incompat::MIXED_BACKREF, ..default() },
        ),
        ("not skinny", 256 * MIB, MkfsOptions { incompat: incompat - Incompat::SKINNY_METADATA, ..default() }),
        ("holes", 256 * MIB, MkfsOptions { incompat: incompat - Incompat::NO_HOLES, ..default() }),
        ("xxhash", 256 * MIB, MkfsOptions { csum_type: CsumType::Xxhash, ..default() }),
        ("sha256", 256 * MIB, MkfsOptions { csum_type: CsumType::Sha256, ..default() }),
        ("blake2", 256 * MIB, MkfsOptions { csum_type: CsumType::Blake2, ..default() }),
    ]
}

/// Combinations with sector sizes that the kernel may not be able to mount.
fn big_sectors() -> Vec<(&'static str, u64, MkfsOptions)> {
    let of = |sectorsize, nodesize| MkfsOptions { sectorsize, nodesize, ..MkfsOptions::default() };
    vec![
        ("sector 8K", 256 * MIB, of(8192, 16384)),
        ("sector 16K", 256 * MIB, of(16384, 16384)),
        ("sector 64K", 256 * MIB, of(65536, 65536)),
    ]
}

#[test]
fn btrfs_check_finds_no_error() {
    if !has_progs() {
        return;
    }
    for (name, len_bytes, options) in matrix().into_iter().chain(big_sectors()) {
        eprintln!("{name}");
        let dir = tempfile::tempdir().unwrap();
        check(&image(&dir, len_bytes, &options));
    }
}

struct Mounted {
    node: String,
    mount: String,
}

impl Mounted {
    fn new(path: &Path) -> Self {
        let node = run("losetup", &["-f", "--show", path.to_str().unwrap()]).expect("losetup");
        let mount = path.with_extension("mnt").to_str().unwrap().to_owned();
        std::fs::create_dir_all(&mount).unwrap();
        let mounted = Self { node, mount };
        run("mount", &["-t", "btrfs", &mounted.node, &mounted.mount]).expect("mount");
        mounted
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let unmounted = run("umount", &[&self.mount]);
        let detached = run("losetup", &["-d", &self.node]);
        if !std::thread::panicking() {
            unmounted.and(detached).unwrap();
        }
    }
}

#[test]
fn the_kernel_mounts_writes_and_scrubs_it() {
    if !has_progs() || !has_loop() {
        return;
    }
    for (name, len_bytes, options) in matrix() {
        eprintln!("{name}");
        let dir = tempfile::tempdir().unwrap();
        let path = image(&dir, len_bytes, &options);
        let mounted = Mounted::new(&path);
        let content: Vec<u8> = (0..300_000u32).map(|n| (n / 7) as u8).collect();
        // The smallest filesystems have room for few files.
        let nr_files = if len_bytes < 64 * MIB { 1 } else { 20 };
        for n in 0..nr_files {
            std::fs::write(format!("{}/file{n}", mounted.mount), &content).expect("write");
        }
        run("sync", &["-f", &mounted.mount]).expect("sync");
        let label = run("btrfs", &["filesystem", "label", &mounted.mount]).expect("label");
        assert_eq!(label.as_bytes(), options.label);
        let scrub = run("btrfs", &["scrub", "start", "-B", &mounted.mount]).expect("scrub");
        assert!(scrub.contains("no errors found"), "{scrub}");
        drop(mounted);
        check(&path);
    }
}

/// Returns the keys of each tree of an image, without parts that always differ between two images.
fn keys(path: &Path, is_old: bool) -> BTreeMap<String, Vec<String>> {
    let text = run("btrfs", &["inspect-internal", "dump-tree", path.to_str().unwrap()]).expect("dump-tree");
    let mut trees: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut owner = String::new();
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        if matches!(words.first(), Some(&"leaf" | &"node")) && words.contains(&"owner") {
            owner = words[words.len() - 1].to_owned();
            trees.entry(owner.clone()).or_default();
        }
        let Some((_, rest)) = line.split_once(" key (") else { continue };
        if !line.trim_start().starts_with("item ") {
            continue;
        }
        let (key, _) = rest.split_once(')').expect("a key ends with a parenthesis");
        let mut parts: Vec<&str> = key.split(' ').collect();
        match parts[1] {
            // Do not compare the addresses of tree blocks and of free space, which depend on the order of writing, nor
            // the UUID, which is random.
            "METADATA_ITEM" | "EXTENT_ITEM" | "UUID_KEY_SUBVOL" => (parts[0], parts[2]) = ("*", "*"),
            "FREE_SPACE_EXTENT" => continue,
            // Skip the entries of temporary block groups, which mkfs.btrfs leaves behind.
            "FREE_SPACE_INFO" if is_old && is_temporary(parts[0], &trees) => continue,
            _ => {}
        }
        trees.get_mut(&owner).expect("a leaf precedes its items").push(parts.join(" "));
    }
    trees.values_mut().for_each(|keys| keys.sort());
    trees
}

fn is_temporary(start: &str, trees: &BTreeMap<String, Vec<String>>) -> bool {
    let chunk = format!("FIRST_CHUNK_TREE CHUNK_ITEM {start}");
    !trees["CHUNK_TREE"].contains(&chunk)
}

#[test]
fn the_trees_have_the_keys_of_mkfs_btrfs() {
    if !has_progs() || !available("mkfs.btrfs", run("mkfs.btrfs", &["--version"])) {
        return;
    }
    let default = MkfsOptions::default;
    let incompat = default().incompat;
    let cases: Vec<(&[&str], u64, MkfsOptions)> = vec![
        (&[], 1024 * MIB, default()),
        (&[], 109 * MIB, default()),
        (&[], 5 << 30, default()),
        (&[], 60 << 30, default()),
        (&["-m", "single"], 1024 * MIB, MkfsOptions { metadata_profile: SINGLE, ..default() }),
        (&["-d", "dup"], 1024 * MIB, MkfsOptions { data_profile: DUP, ..default() }),
        (&["-d", "dup"], 20 << 30, MkfsOptions { data_profile: DUP, ..default() }),
        (
            &["-d", "dup", "-m", "single"],
            1024 * MIB,
            MkfsOptions { data_profile: DUP, metadata_profile: SINGLE, ..default() },
        ),
        (&["-n", "4096"], 1024 * MIB, MkfsOptions { nodesize: 4096, ..default() }),
        (&["-n", "65536", "-s", "65536"], 5 << 30, MkfsOptions { nodesize: 65536, sectorsize: 65536, ..default() }),
        (&["--mixed"], 300 * MIB, MkfsOptions { mixed: true, nodesize: 4096, metadata_profile: SINGLE, ..default() }),
        (
            &["--mixed", "-m", "dup", "-d", "dup"],
            1024 * MIB,
            MkfsOptions { mixed: true, nodesize: 4096, data_profile: DUP, ..default() },
        ),
        (
            &["-O", "^skinny-metadata,^no-holes"],
            1024 * MIB,
            MkfsOptions { incompat: incompat - Incompat::SKINNY_METADATA - Incompat::NO_HOLES, ..default() },
        ),
        (&["-R", "^free-space-tree"], 1024 * MIB, MkfsOptions { compat_ro: CompatRo::empty(), ..default() }),
    ];
    for (args, len_bytes, options) in cases {
        eprintln!("{args:?} {len_bytes}");
        let dir = tempfile::tempdir().unwrap();
        let theirs = dir.path().join("theirs.img");
        drop(FileDevice::create(&theirs, len_bytes, true).unwrap());
        run("mkfs.btrfs", &[&["-q"], args, &[theirs.to_str().unwrap()]].concat()).expect("mkfs.btrfs");
        let (old, new) = (keys(&theirs, true), keys(&image(&dir, len_bytes, &options), false));
        assert_eq!(new, old);
    }
}

#[test]
fn a_device_with_content_is_left_unchanged() {
    let dir = tempfile::tempdir().unwrap();
    let options = MkfsOptions::default();
    let path = image(&dir, 128 * MIB, &options);
    let before = std::fs::read(&path).unwrap();
    let device = FileDevice::open(&path, Access::ReadWrite).unwrap();
    let refused = make(&device, &MkfsOptions::default()).unwrap_err().to_string();
    assert!(refused.contains("contains a btrfs filesystem"), "{refused}");
    assert!(before == std::fs::read(&path).unwrap());
    make(&device, &MkfsOptions { force: true, ..Default::default() }).unwrap();
    assert!(before != std::fs::read(&path).unwrap());
    if has_progs() {
        check(&path);
    }
}

#[test]
fn a_device_that_is_too_small_is_left_unchanged() {
    let dir = tempfile::tempdir().unwrap();
    let options = MkfsOptions::default();
    let min = ubtrfs_mkfs::min_size(&options, 1);
    let device = FileDevice::create(&dir.path().join("image"), min - 1, true).unwrap();
    device.write_at(0, b"precious").unwrap();
    let refused = make(&device, &options).unwrap_err().to_string();
    assert!(refused.contains(&format!("needs at least {}M;", min >> 20)), "{refused}");
    let mut found = [0; 8];
    device.read_at(0, &mut found).unwrap();
    assert_eq!(&found, b"precious");
}
