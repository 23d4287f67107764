//! Tests that the checker finds no problems in rare states of a filesystem: Linux is deleting subvolumes or balancing,
//! quotas are on, a log must be replayed, or open files have no names. Also tests that the checker finds no problems
//! after random operations of the engine, in formats that ubtrfs makes.
//!
//! By default, at least 16 images of Linux and 12 of the engine are checked. With `UBTRFS_CLEAN=100`, at least 100 of
//! each are checked.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use crate::common::check;
use ubtrfs_device::{Access, FileDevice};
use ubtrfs_format::CsumType;
use ubtrfs_format::item::BlockGroupFlags;
use ubtrfs_mkfs::MkfsOptions;
use ubtrfs_testkit::{
    Driver, FsTarget, Image, KernelImage, KernelImageSpec, LoopMount, Model, Rng, btrfs_check_output, capability, run,
};

fn wanted(default: usize) -> usize {
    std::env::var("UBTRFS_CLEAN").ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// Describes the problems that the checker found in an image, with the verdict of `btrfs check`. Returns `None` if the
/// checker found no problems.
fn false_alarm(image: &Path, what: &str) -> Option<String> {
    let (report, problems) = check(image);
    if report.is_clean() && problems.is_empty() {
        return None;
    }
    let (success, said) = btrfs_check_output(image, &["--readonly"]).unwrap();
    let lines: Vec<String> = problems.iter().map(|problem| problem.to_string()).collect();
    let verdict = if success { "clean" } else { "damaged" };
    Some(format!("{what}: btrfs check says {verdict}\n{}\n{said}", lines.join("\n")))
}

/// Copies the image while Linux's filesystem is frozen.
fn frozen_copy(image: &Image, mount: &LoopMount) -> Image {
    run("fsfreeze", ["-f".as_ref(), mount.path().as_os_str()]).unwrap();
    let copy = Image::copy_of(image.path());
    run("fsfreeze", ["-u".as_ref(), mount.path().as_os_str()]).unwrap();
    copy.unwrap()
}

fn fill(dir: &Path, rng: &mut Rng, files: usize) {
    fs::create_dir_all(dir).unwrap();
    for file in 0..files {
        let len = rng.len(20_000) as usize;
        fs::write(dir.join(format!("file-{file}")), rng.content(len)).unwrap();
    }
}

fn scribble(dir: &Path, rng: &mut Rng, files: usize) {
    for _ in 0..files / 2 {
        let path = dir.join(format!("file-{}", rng.below(files as u64)));
        match rng.below(5) {
            0 => drop(fs::remove_file(&path)),
            1 => drop(fs::rename(&path, path.with_extension("renamed"))),
            2 => drop(fs::hard_link(&path, path.with_extension("link"))),
            3 => {
                let to = dir.join(format!("file-{}", rng.below(files as u64)));
                let _ = run("cp", ["--reflink=always".as_ref(), path.as_os_str(), to.as_os_str()]);
            }
            _ => {
                if let Ok(mut file) = File::options().append(true).open(&path) {
                    let len = rng.len(9000) as usize;
                    file.write_all(&rng.bytes(len)).unwrap();
                }
            }
        }
    }
}

/// Runs operations on a filesystem of Linux. Returns copies of the image, each with a description of the filesystem's
/// state.
fn linux_life(spec: KernelImageSpec, seed: u64) -> Vec<(String, Image)> {
    let mut rng = Rng::new(seed);
    let made = KernelImage::empty(KernelImageSpec { len_bytes: 1 << 30, ..spec }).unwrap();
    let options =
        if made.spec.mount.is_empty() { "commit=300".to_owned() } else { format!("commit=300,{}", made.spec.mount) };
    let mount = LoopMount::new(made.image.path(), &options).unwrap();
    let path = |name: &str| mount.join(name).to_string_lossy().into_owned();
    let mut copies = Vec::new();
    let mut keep = |what: String| copies.push((what, frozen_copy(&made.image, &mount)));
    let with_quota = rng.one_in(2);
    if with_quota {
        mount.enable_quota().unwrap();
    }
    let files = 400;
    run("btrfs", ["subvolume", "create", &path("one")]).unwrap();
    fill(&mount.join("one/dir"), &mut rng, files);
    for round in 0..3 {
        let snapshot = format!("snapshot-{round}");
        run("btrfs", ["subvolume", "snapshot", &path("one"), &path(&snapshot)]).unwrap();
        scribble(&mount.join("one/dir"), &mut rng, files);
        scribble(&mount.join(format!("{snapshot}/dir")), &mut rng, files);
    }
    keep("snapshots".to_owned());
    run("btrfs", ["subvolume", "snapshot", "-r", &path("snapshot-1"), &path("snapshot-of-snapshot")]).unwrap();
    run("btrfs", ["subvolume", "delete", &path("snapshot-0"), &path("one")]).unwrap();
    keep("subvolumes deleted".to_owned());
    std::thread::sleep(std::time::Duration::from_millis(rng.below(300)));
    keep("subvolumes deleted a moment ago".to_owned());
    // Balance a filesystem with snapshots.
    let point = path("");
    let balance = std::thread::spawn(move || run("btrfs", ["balance", "start", "--full-balance", &point]).map(drop));
    for _ in 0..2 {
        std::thread::sleep(std::time::Duration::from_millis(rng.below(400)));
        if !balance.is_finished() {
            keep("amid a balance".to_owned());
        }
    }
    balance.join().unwrap().unwrap();
    keep("after a balance".to_owned());
    // Balance one data chunk: some of the leaves that refer to the chunk move, and some of the neighbours of these
    // leaves do not.
    run("btrfs", ["balance", "start", "-dlimit=1", &path("")]).unwrap();
    keep("after a balance of some data".to_owned());
    scribble(&mount.join("snapshot-1/dir"), &mut rng, files);
    let open = File::create(mount.join("without-a-name")).unwrap();
    (&open).write_all(&rng.bytes(100_000)).unwrap();
    fs::remove_file(mount.join("without-a-name")).unwrap();
    keep("an open file without a name".to_owned());
    // fsync leaves a log behind.
    let mut file = File::create(mount.join("synced")).unwrap();
    file.write_all(&rng.bytes(50_000)).unwrap();
    file.sync_all().unwrap();
    copies.push(("a log".to_owned(), Image::copy_of(made.image.path()).unwrap()));
    drop((open, file));
    mount.close().unwrap();
    copies.push(("unmounted".to_owned(), Image::copy_of(made.image.path()).unwrap()));
    copies.into_iter().map(|(what, image)| (format!("{what}, quotas {with_quota}"), image)).collect()
}

#[test]
fn states_of_linux() {
    if !capability::kernel_oracle() || !capability::program("fsfreeze") {
        return;
    }
    let seed = Rng::seed_or(1);
    let wanted = wanted(16);
    println!("seed {seed}");
    let (mut alarms, mut nr_images) = (Vec::new(), 0);
    for (round, spec) in (seed..).zip(KernelImageSpec::matrix().into_iter().cycle()) {
        let name = spec.name;
        for (what, image) in linux_life(spec, round) {
            nr_images += 1;
            alarms.extend(false_alarm(image.path(), &format!("seed {round}, {name}, {what}")));
        }
        if nr_images >= wanted {
            break;
        }
    }
    println!("{nr_images} images of Linux, {} alarms", alarms.len());
    assert!(alarms.is_empty(), "{}", alarms.join("\n\n"));
}

#[test]
fn states_of_the_engine() {
    let seed = Rng::seed_or(1);
    let wanted = wanted(12);
    println!("seed {seed}");
    let (mut alarms, mut nr_images) = (Vec::new(), 0);
    for round in seed.. {
        let mut rng = Rng::new(round);
        let mixed = rng.one_in(6);
        let profile = |rng: &mut Rng| if rng.one_in(2) { BlockGroupFlags::DUP } else { BlockGroupFlags::empty() };
        let options = MkfsOptions {
            nodesize: if mixed { 4096 } else { *rng.pick(&[4096, 16_384, 65_536]) },
            csum_type: *rng.pick(&[CsumType::Crc32c, CsumType::Xxhash, CsumType::Sha256, CsumType::Blake2]),
            mixed,
            metadata_profile: profile(&mut rng),
            data_profile: profile(&mut rng),
            ..MkfsOptions::default()
        };
        let options = if mixed { MkfsOptions { data_profile: options.metadata_profile, ..options } } else { options };
        let mount =
            *rng.pick(&["", "", "compress=zstd", "compress-force=lzo", "compress=zlib", "nodatacow", "nodatasum"]);
        let what = format!("seed {round}, {options:?}, {mount}");
        let image = Image::empty(1 << 30).unwrap();
        let device = FileDevice::open(image.path(), Access::ReadWrite).unwrap();
        ubtrfs_mkfs::make(&device, &options).unwrap();
        drop(device);
        let (mut model, mut driver) = (Model::new(), Driver::new(round, 1 << 20));
        for _ in 0..3 {
            let mut target = FsTarget::open(image.path(), mount).unwrap();
            driver.run(&mut model, &mut target, 300).unwrap();
            target.close().unwrap();
            nr_images += 1;
            alarms.extend(false_alarm(image.path(), &what));
        }
        if nr_images >= wanted {
            break;
        }
    }
    println!("{nr_images} images of the engine, {} alarms", alarms.len());
    assert!(alarms.is_empty(), "{}", alarms.join("\n\n"));
}
