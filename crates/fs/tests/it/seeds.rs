//! Tests filesystems on seeds, made by Linux or by us, judged by Linux.
//!
//! Method: one side makes the filesystem on a seed, and the other side changes it, reads it, and removes the seed. After each
//! test the images of the seed are bit for bit as before.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ubtrfs_device::{Access, Device, FileDevice, find_members, is_seed};
use ubtrfs_format::item::{BalanceArgs, BalanceFlags, BalanceItem, BlockGroupFlags};
use ubtrfs_format::superblock::{Incompat, SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE, Superblock};
use ubtrfs_format::{DevId, Ino, RootId, check_superblock};
use ubtrfs_fs::{Fs, InodeId, Job, MemberState, MountOptions, ReplaceRequest, ScrubStart, find_devices};
use ubtrfs_mkfs::MkfsOptions;
use ubtrfs_testkit::{LoopDevice, Medium, MediumDevice, RecordingDevice, Rng, capability, run, ubtrfs_check_errors};
use ubtrfs_volumes::{Tuning, tune};

use super::arrays::{Array, content, get, open_device, put};
use super::devices::{devids, fill, verify};

const MIB: u64 = 1 << 20;
const TOP: InodeId = InodeId { root: RootId::FS_TREE, ino: Ino::ROOT_DIR };
const KINDS: [Kind; 2] = [("single", "dup", 1), ("raid1", "raid1", 2)];

/// The profiles of data and metadata on a seed, and its number of devices.
type Kind = (&'static str, &'static str, usize);

/// The images of a seed, and their content.
struct Seed {
    array: Array,
    before: Vec<Vec<u8>>,
}

impl Seed {
    /// Makes a seed with a file.
    fn new((data, metadata, nr_devices): Kind) -> Self {
        let array = Array::new(&["-d", data, "-m", metadata], &vec![400; nr_devices]);
        let fs = array.open();
        put(&fs, "of the seed", &content(30 * MIB, 1));
        fs.close().unwrap();
        drop(fs);
        make_seed(&array.images);
        let before = array.images.iter().map(|image| std::fs::read(image).unwrap()).collect();
        Self { array, before }
    }

    /// Makes another image.
    fn add_image(&mut self, name: &str) -> PathBuf {
        let image = self.array.images[0].with_file_name(name);
        drop(FileDevice::create(&image, 600 * MIB, true).unwrap());
        image
    }

    /// Makes a filesystem on the seed.
    fn sprout(&mut self, name: &str) -> PathBuf {
        let image = self.add_image(name);
        let fs = Fs::open(open(&self.array.images), MountOptions::default()).unwrap();
        fs.make_sprout(open_device(&image), &Job::new()).unwrap();
        close(fs);
        image
    }

    /// Lets Linux make a filesystem on the seed, with a file.
    fn sprout_of_linux(&mut self, name: &str) -> PathBuf {
        let image = self.add_image(name);
        let images = self.with(&image);
        let loops: Vec<LoopDevice> = images.iter().map(|image| LoopDevice::over(image).unwrap()).collect();
        let paths: Vec<&str> = loops.iter().map(LoopDevice::path).collect();
        let (new, old) = paths.split_first().unwrap();
        run("btrfs", ["device", "scan"].into_iter().chain(old.iter().copied())).unwrap();
        let point = image.with_extension("mnt");
        std::fs::create_dir_all(&point).unwrap();
        let point = point.to_str().unwrap();
        run("mount", ["-t", "btrfs", old[0], point]).unwrap();
        run("btrfs", ["device", "add", "-f", new, point]).unwrap();
        run("mount", ["-o", "remount,rw", point]).unwrap();
        std::fs::write(Path::new(point).join("of the sprout"), content(20 * MIB, 2)).unwrap();
        run("umount", [point]).unwrap();
        run("btrfs", ["device", "scan", "--forget"].into_iter().chain(paths)).unwrap();
        drop(loops);
        wait_for(&images);
        image
    }

    /// The image of a filesystem on the seed, and the images of the seed.
    fn with(&self, sprout: &Path) -> Vec<PathBuf> {
        std::iter::once(sprout.to_owned()).chain(self.array.images.iter().cloned()).collect()
    }

    /// Lets Linux check, mount, compare and scrub a filesystem, which has `nr_fills` fills, and work on it.
    fn judge(&self, images: &[PathBuf], nr_fills: u64, work: impl FnOnce(&Path)) -> (u64, u64) {
        let numbers = self.array.judge_some(&images.iter().collect::<Vec<_>>(), "rw", |point| {
            assert!(std::fs::read(point.join("of the seed")).unwrap() == content(30 * MIB, 1));
            for seed in 1..=nr_fills {
                assert!(std::fs::read(point.join(format!("big{seed}"))).unwrap() == content(30 * MIB, seed), "{seed}");
            }
            work(point);
        });
        wait_for(images);
        numbers
    }

    fn check_untouched(&self) {
        for (image, before) in self.array.images.iter().zip(&self.before) {
            assert!(std::fs::read(image).unwrap() == *before, "{} was written", image.display());
        }
    }
}

/// Lets btrfs-progs make a filesystem a seed. The first image is its own.
fn make_seed(images: &[PathBuf]) {
    let loops: Vec<LoopDevice> = images.iter().map(|image| LoopDevice::over(image).unwrap()).collect();
    let paths: Vec<&str> = loops.iter().map(LoopDevice::path).collect();
    run("btrfs", ["device", "scan"].into_iter().chain(paths.iter().copied())).unwrap();
    run("btrfstune", ["-S", "1", paths[0]]).unwrap();
    run("btrfs", ["device", "scan", "--forget"].into_iter().chain(paths)).unwrap();
    drop(loops);
    wait_for(images);
}

/// Waits until other programs do not look at the loop devices of these images any more.
fn wait_for(images: &[PathBuf]) {
    while !images.iter().all(|image| FileDevice::open(image, Access::ReadWrite).is_ok()) {
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
}

/// Opens a filesystem, which must be writable.
fn opened(images: &[PathBuf]) -> Arc<Fs> {
    let fs = Fs::open(open(images), MountOptions::default()).unwrap();
    assert_eq!(fs.read_only(), None);
    fs
}

fn close(fs: Arc<Fs>) {
    fs.close().unwrap();
}

/// Opens the devices, those of seeds for reading.
fn open(images: &[PathBuf]) -> Vec<Arc<dyn Device>> {
    let access = |image: &Path| if is_seed(image) { Access::ReadOnly } else { Access::ReadWrite };
    let device = |image: &PathBuf| Arc::new(FileDevice::open(image, access(image)).unwrap()) as Arc<dyn Device>;
    images.iter().map(device).collect()
}

#[test]
fn a_filesystem_on_a_seed_that_linux_made_is_changed() {
    if !capability::kernel_oracle() {
        return;
    }
    for kind in KINDS {
        eprintln!("{kind:?}");
        let mut seed = Seed::new(kind);
        let sprout = seed.sprout_of_linux("sprout.img");
        // The seed is found beside the filesystem on it, and other seeds are not: their ids are free, too.
        let foreign = sprout.with_file_name("foreign.img");
        std::fs::copy(&Seed::new(kind).array.images[0], &foreign).unwrap();
        assert!(find_members(&[&sprout]).unwrap().seeds.iter().any(|seed| seed.path == foreign));
        let members = find_devices(&[&sprout]).unwrap();
        assert_eq!((members.found, members.seeds), (seed.array.images.clone(), vec![]));
        let all = seed.with(&sprout);
        let fs = opened(&all);
        assert!(get(&fs, "of the seed", 30 * MIB) == content(30 * MIB, 1));
        assert!(get(&fs, "of the sprout", 20 * MIB) == content(20 * MIB, 2));
        let devices = fs.space_usage().devices;
        assert_eq!(devices.iter().filter(|device| device.is_seed).count(), kind.2);
        fill(&fs, 1);
        close(fs);
        let fs = opened(&all);
        verify(&fs, 1);
        let id = fs.lookup(TOP, b"big1").unwrap().id;
        fs.write(id, 0, &content(30 * MIB, 1)).unwrap();
        fs.fsync(id, false).unwrap();
        fill(&fs, 2);
        close(fs);
        let problems = ubtrfs_check_errors(open(&all)).unwrap();
        assert!(problems.is_empty(), "{problems:?}");
        let fs = opened(&all);
        let stat = fs.statfs().unwrap();
        let ours = (stat.blocks * u64::from(stat.bsize), stat.bavail * u64::from(stat.bsize));
        close(fs);
        let df = seed.judge(&all, 2, |point| {
            assert!(std::fs::read(point.join("of the sprout")).unwrap() == content(20 * MIB, 2));
            std::fs::write(point.join("of linux"), content(10 * MIB, 3)).unwrap();
        });
        if kind.0 == "single" {
            // Otherwise Linux divides all space by the number of copies on the seed.
            assert_eq!(df, ours);
        }
        let fs = opened(&all);
        assert!(get(&fs, "of linux", 10 * MIB) == content(10 * MIB, 3));
        close(fs);
        // The seed alone is still a filesystem.
        let fs = Fs::open(open(&seed.array.images), MountOptions::default()).unwrap();
        assert_eq!(fs.read_only().as_deref(), Some("it is a seed filesystem"));
        close(fs);
        // Without the seed, the message names it.
        let fs = Fs::open(open(std::slice::from_ref(&sprout)), MountOptions::default());
        let text = match &fs {
            Ok(fs) => fs.read_only().expect("its seed is missing"),
            Err(error) => error.to_string(),
        };
        assert!(text.contains("seed device 1") || text.contains("missing device 1"), "{text}");
        drop(fs);
        seed.check_untouched();
    }
}

#[test]
fn a_seed_gets_several_filesystems_on_it_and_leaves_them() {
    if !capability::kernel_oracle() {
        return;
    }
    for kind in KINDS {
        eprintln!("{kind:?}");
        let mut seed = Seed::new(kind);
        let sprouts = [seed.sprout("sprout1.img"), seed.sprout("sprout2.img"), seed.sprout_of_linux("sprout3.img")];
        let fsids = sprouts.iter().map(|sprout| opened(&seed.with(sprout)).superblock().fsid);
        assert_eq!(fsids.collect::<BTreeSet<_>>().len(), 3);
        for (sprout, other) in sprouts.iter().zip(sprouts.iter().skip(1)) {
            seed.judge(&seed.with(sprout), 0, |point| std::fs::write(point.join("new"), b"new").unwrap());
            let fs = opened(&seed.with(sprout));
            fill(&fs, 1);
            let seeds: Vec<DevId> = (1..=kind.2 as u64).map(DevId).collect();
            fs.remove_devices(&seeds, &Job::new()).unwrap();
            assert_eq!(devids(&fs), [kind.2 as u64 + 1]);
            assert!(get(&fs, "of the seed", 30 * MIB) == content(30 * MIB, 1));
            verify(&fs, 1);
            close(fs);
            seed.check_untouched();
            // It stands alone.
            let alone = [sprout.clone()];
            assert_eq!(find_devices(&[sprout]).unwrap().found, Vec::<PathBuf>::new());
            seed.judge(&alone, 1, |_| {});
            let problems = ubtrfs_check_errors(open(&alone)).unwrap();
            assert!(problems.is_empty(), "{problems:?}");
            let fs = opened(&alone);
            fill(&fs, 2);
            close(fs);
            seed.judge(&alone, 2, |_| {});
            seed.judge(&seed.with(other), 0, |_| {});
        }
        seed.check_untouched();
    }
}

#[test]
fn linux_removes_the_seed_of_a_filesystem_that_we_made() {
    if !capability::kernel_oracle() {
        return;
    }
    let mut seed = Seed::new(("single", "dup", 1));
    let sprout = seed.sprout("sprout.img");
    let fs = opened(&seed.with(&sprout));
    fill(&fs, 1);
    close(fs);
    seed.judge(&seed.with(&sprout), 1, |point| {
        run("btrfs", ["device", "remove", "1", point.to_str().unwrap()]).unwrap();
    });
    let fs = opened(std::slice::from_ref(&sprout));
    verify(&fs, 1);
    fill(&fs, 2);
    close(fs);
    seed.judge(&[sprout], 2, |_| {});
    seed.check_untouched();
}

/// A seed in memory with a file, and its content.
fn seed_in_memory() -> (Arc<MediumDevice>, Medium) {
    let device = Arc::new(MediumDevice::new(Medium::formatted(200 * MIB, &MkfsOptions::default()).unwrap()));
    let fs = in_memory(&[Arc::clone(&device) as Arc<dyn Device>]);
    put(&fs, "of the seed", &content(3 * MIB, 1));
    close(fs);
    let tuning = Tuning { fsid: None, seeding: Some(true), features: Incompat::empty() };
    tune(&[Arc::clone(&device) as Arc<dyn Device>], &tuning).unwrap();
    let before = device.content();
    (device, before)
}

fn in_memory(devices: &[Arc<dyn Device>]) -> Arc<Fs> {
    Fs::open(devices.to_vec(), MountOptions::default()).unwrap()
}

/// Whether two media have the same content.
pub(crate) fn is_same(one: &Medium, other: &Medium) -> bool {
    let piece = |medium: &Medium, at: u64| {
        let mut piece = vec![0; MIB as usize];
        medium.read(at, &mut piece);
        piece
    };
    (0..one.len_bytes()).step_by(MIB as usize).all(|at| piece(one, at) == piece(other, at))
}

/// Whether the primary superblock of a device is valid.
fn has_superblock(medium: &Medium) -> bool {
    let mut raw = vec![0; SUPERBLOCK_SIZE];
    medium.read(SUPERBLOCK_OFFSETS[0], &mut raw);
    Superblock::decode(&raw).is_ok_and(|superblock| check_superblock(&superblock, &raw).is_ok())
}

#[test]
fn a_cut_while_a_filesystem_on_a_seed_is_made_leaves_the_seed_or_both() {
    let (seed, before) = seed_in_memory();
    let new = Arc::new(RecordingDevice::new(Medium::zeros(200 * MIB)));
    let of_seed = in_memory(&[Arc::clone(&seed) as Arc<dyn Device>]);
    of_seed.make_sprout(Arc::clone(&new) as Arc<dyn Device>, &Job::new()).unwrap();
    assert!(of_seed.read_only().is_some() && of_seed.is_seed());
    close(of_seed);
    let (mut rng, mut cuts) = (Rng::new(Rng::seed_or(1)), new.cuts());
    let mut nr_made = 0;
    for events in 0..=new.events() {
        let (medium, _) = cuts.cut(events, &mut rng);
        if has_superblock(&medium) {
            nr_made += 1;
            let fs = in_memory(&[Arc::new(MediumDevice::new(medium)), Arc::clone(&seed) as Arc<dyn Device>]);
            assert_eq!(fs.read_only(), None, "after {events} events");
            assert!(get(&fs, "of the seed", 3 * MIB) == content(3 * MIB, 1), "after {events} events");
            put(&fs, "new", &content(MIB, 2));
            close(fs);
        } else {
            let fs = in_memory(&[Arc::clone(&seed) as Arc<dyn Device>]);
            assert!(fs.is_seed(), "after {events} events");
            close(fs);
        }
    }
    assert!(nr_made > 0 && nr_made < new.events(), "{nr_made} of {} states are of the new filesystem", new.events());
    assert!(is_same(&seed.content(), &before));
}

#[test]
fn a_cut_while_the_seed_is_removed_loses_nothing() {
    let (seed, before) = seed_in_memory();
    let new = Arc::new(MediumDevice::new(Medium::zeros(300 * MIB)));
    in_memory(&[Arc::clone(&seed) as Arc<dyn Device>])
        .make_sprout(Arc::clone(&new) as Arc<dyn Device>, &Job::new())
        .unwrap();
    let new = Arc::new(RecordingDevice::new(new.content()));
    let fs = in_memory(&[Arc::clone(&new) as Arc<dyn Device>, Arc::clone(&seed) as Arc<dyn Device>]);
    put(&fs, "own", &content(MIB, 2));
    fs.sync().unwrap();
    new.mark(1);
    fs.remove_devices(&[DevId(1)], &Job::new()).unwrap();
    new.mark(2);
    close(fs);
    let (mut rng, mut cuts) = (Rng::new(Rng::seed_or(1)), new.cuts());
    let points: Vec<usize> =
        new.flush_points().into_iter().filter(|&point| point >= new.mark_points(0..1)[0]).collect();
    for events in points {
        let (medium, outcome) = cuts.cut(events, &mut rng);
        let fs = in_memory(&[Arc::new(MediumDevice::new(medium)), Arc::clone(&seed) as Arc<dyn Device>]);
        assert_eq!(fs.read_only(), None, "after {events} events");
        assert!(get(&fs, "of the seed", 3 * MIB) == content(3 * MIB, 1), "after {events} events");
        assert!(get(&fs, "own", MIB) == content(MIB, 2), "after {events} events");
        if outcome.promised == Some(2) {
            assert_eq!(devids(&fs), [2]);
        }
        close(fs);
    }
    assert!(is_same(&seed.content(), &before));
}

#[test]
fn a_balance_empties_the_block_groups_on_a_seed() {
    let (on_seed, before) = seed_in_memory();
    let new = Arc::new(MediumDevice::new(Medium::zeros(300 * MIB)));
    let seed = Arc::clone(&on_seed) as Arc<dyn Device>;
    in_memory(&[Arc::clone(&seed)]).make_sprout(Arc::clone(&new) as Arc<dyn Device>, &Job::new()).unwrap();
    let fs = in_memory(&[Arc::clone(&new) as Arc<dyn Device>, Arc::clone(&seed)]);
    let is_on_seed = |fs: &Fs| fs.space_usage().devices.iter().any(|device| device.is_seed && device.allocated > 0);
    assert!(is_on_seed(&fs));
    let flags = BalanceFlags::DATA | BalanceFlags::METADATA | BalanceFlags::SYSTEM | BalanceFlags::FORCE;
    let all = || BalanceArgs::NONE;
    let item = BalanceItem { flags: flags.bits(), data: all(), metadata: all(), system: all(), unused: [0; 4] };
    let report = fs.balance(item, &Job::new()).unwrap();
    assert!(report.failures.is_empty(), "{:?}", report.failures);
    fs.sync().unwrap();
    assert!(!is_on_seed(&fs));
    assert_eq!(devids(&fs), [1, 2]);
    fs.remove_devices(&[DevId(1)], &Job::new()).unwrap();
    close(fs);
    let fs = in_memory(&[Arc::clone(&new) as Arc<dyn Device>]);
    assert!(get(&fs, "of the seed", 3 * MIB) == content(3 * MIB, 1));
    close(fs);
    let problems = ubtrfs_check_errors(vec![new as Arc<dyn Device>]).unwrap();
    assert!(problems.is_empty(), "{problems:?}");
    assert!(is_same(&on_seed.content(), &before));
}

#[test]
fn a_scrub_reads_a_seed_and_does_not_repair_it() {
    let (seed, before) = seed_in_memory();
    let new = Arc::new(MediumDevice::new(Medium::zeros(300 * MIB)));
    in_memory(&[Arc::clone(&seed) as Arc<dyn Device>])
        .make_sprout(Arc::clone(&new) as Arc<dyn Device>, &Job::new())
        .unwrap();
    // Damages the first copies of all metadata on the seed.
    let mut damaged = before.clone();
    let fs = in_memory(&[Arc::clone(&new) as Arc<dyn Device>, Arc::clone(&seed) as Arc<dyn Device>]);
    let stripes = fs.block_groups().into_iter().filter(|group| group.flags.contains(BlockGroupFlags::METADATA));
    let stripes: Vec<(u64, u64)> = stripes
        .filter_map(|group| {
            let stripe = *fs.chunk_at(group.start)?.stripes.first()?;
            (stripe.devid == DevId(1)).then_some((stripe.offset.0, group.len_bytes))
        })
        .collect();
    close(fs);
    let mut block = vec![0; 16384];
    let mut nr_damaged = 0;
    for (offset, len) in stripes {
        for at in (offset..offset + len).step_by(block.len()) {
            before.read(at, &mut block);
            if block.iter().any(|byte| *byte != 0) {
                block[200] ^= 1;
                damaged.write(at, &block);
                nr_damaged += 1;
            }
        }
    }
    assert!(nr_damaged > 0);
    let seed = Arc::new(MediumDevice::new(damaged.clone()));
    let fs = in_memory(&[new as Arc<dyn Device>, Arc::clone(&seed) as Arc<dyn Device>]);
    assert!(get(&fs, "of the seed", 3 * MIB) == content(3 * MIB, 1));
    let starts: Vec<ScrubStart> = [1, 2]
        .into_iter()
        .map(|devid| ScrubStart { devid: DevId(devid), start: 0, limit: 0, io_priority: None })
        .collect();
    let report = fs.scrub(&starts, true, &Job::new()).unwrap();
    let found: Vec<u64> = report.devices.iter().map(|device| device.counts.verify_errors).collect();
    assert!(found[0] > 0 && found[1] == 0, "{found:?}");
    assert!(report.devices.iter().all(|device| device.counts.uncorrectable_errors == 0));
    put(&fs, "new", &content(MIB, 2));
    close(fs);
    assert!(is_same(&seed.content(), &damaged));
}

/// Nothing is written to a seed, so it misses nothing while it is away.
#[test]
fn a_seed_device_that_was_away_is_used_again() {
    if !capability::kernel_oracle() {
        return;
    }
    let mut seed = Seed::new(KINDS[1]);
    let image = seed.sprout("sprout");
    let present = [image.clone(), seed.array.images[0].clone()];
    let fs = Fs::open(open(&present), MountOptions::parse("degraded").unwrap()).unwrap();
    put(&fs, "while one was away", b"text");
    fs.close().unwrap();
    drop(fs);
    let fs = opened(&seed.with(&image));
    let states: Vec<MemberState> = fs.devices_at_open().1.iter().map(|device| device.state).collect();
    assert_eq!(states, [MemberState::InSync; 3]);
    fs.close().unwrap();
    drop(fs);
    seed.judge(&seed.with(&image), 0, |_| ());
    seed.check_untouched();
}

#[test]
fn a_change_of_a_seed_device_is_refused() {
    let (seed, before) = seed_in_memory();
    let device = || Arc::new(MediumDevice::new(Medium::zeros(300 * MIB))) as Arc<dyn Device>;
    let new = device();
    let seed = seed as Arc<dyn Device>;
    let refused = |result: ubtrfs_fs::Result<()>, part: &str| {
        let text = result.unwrap_err().to_string();
        assert!(text.contains(part) && !text.contains('\n'), "{text}");
    };
    let of_seed = in_memory(&[Arc::clone(&seed)]);
    let small = Arc::new(MediumDevice::new(Medium::zeros(16 * MIB)));
    refused(of_seed.make_sprout(small, &Job::new()).map(drop), "too small");
    of_seed.make_sprout(Arc::clone(&new), &Job::new()).unwrap();
    close(of_seed);
    let fs = in_memory(&[Arc::clone(&new), Arc::clone(&seed)]);
    refused(fs.make_sprout(device(), &Job::new()).map(drop), "not a seed");
    refused(fs.resize_device(DevId(1), 100 * MIB, &Job::new()), "is a seed device");
    let request = ReplaceRequest { devid: DevId(1), device: device(), avoids_source: false };
    refused(fs.replace_device(&request, &Job::new()).map(drop), "is a seed device");
    refused(fs.remove_devices(&[DevId(2)], &Job::new()), "last device of its own");
    close(fs);
    // A seed that was changed meanwhile.
    let changed = Arc::new(MediumDevice::new(before));
    let of = |seeding| Tuning { fsid: None, seeding: Some(seeding), features: Incompat::empty() };
    let devices = [Arc::clone(&changed) as Arc<dyn Device>];
    tune(&devices, &of(false)).unwrap();
    let fs = in_memory(&devices);
    put(&fs, "later", b"later");
    close(fs);
    tune(&devices, &of(true)).unwrap();
    let [changed] = devices;
    let error = Fs::open(vec![new, changed], MountOptions::default()).unwrap_err().to_string();
    assert!(error.contains("seed device that was changed"), "{error}");
}

#[test]
fn a_filesystem_on_a_seed_is_a_seed_itself() {
    if !capability::kernel_oracle() {
        return;
    }
    for by_linux in [false, true] {
        eprintln!("by Linux: {by_linux}");
        let mut seed = Seed::new(("single", "dup", 1));
        let middle = seed.sprout("middle.img");
        let fs = opened(&seed.with(&middle));
        fill(&fs, 1);
        close(fs);
        let both = seed.with(&middle);
        if by_linux {
            make_seed(&both);
        } else {
            let tuning = Tuning { fsid: None, seeding: Some(true), features: Incompat::empty() };
            let alone = tune(&open(std::slice::from_ref(&middle)), &tuning);
            assert!(alone.unwrap_err().to_string().contains("1 of the 2 devices"), "I3 of `tune`");
            tune(&open(&both), &tuning).unwrap();
        }
        let before = std::fs::read(&middle).unwrap();
        let top = seed.add_image("top.img");
        let fs = Fs::open(open(&both), MountOptions::default()).unwrap();
        assert!(fs.is_seed());
        fs.make_sprout(open_device(&top), &Job::new()).unwrap();
        close(fs);
        let found: BTreeSet<PathBuf> = find_devices(&[&top]).unwrap().found.into_iter().collect();
        assert_eq!(found, both.iter().cloned().collect());
        let all: Vec<PathBuf> = std::iter::once(top.clone()).chain(both).collect();
        let fs = opened(&all);
        verify(&fs, 1);
        fill(&fs, 2);
        close(fs);
        seed.judge(&all, 2, |point| std::fs::write(point.join("new"), b"new").unwrap());
        let fs = opened(&all);
        fs.remove_devices(&[DevId(1), DevId(2)], &Job::new()).unwrap();
        verify(&fs, 1);
        verify(&fs, 2);
        close(fs);
        seed.judge(&[top], 2, |_| {});
        assert!(std::fs::read(&middle).unwrap() == before);
        seed.check_untouched();
    }
}

#[test]
fn a_seed_of_another_filesystem_is_left_out() {
    if !capability::kernel_oracle() {
        return;
    }
    let kind = ("single", "dup", 1);
    let (mut seed, other) = (Seed::new(kind), Seed::new(kind));
    let sprout = seed.sprout_of_linux("sprout.img");
    let images = [other.array.images[0].clone(), sprout, seed.array.images[0].clone()];
    let fs = opened(&images);
    assert!(get(&fs, "of the seed", 30 * MIB) == content(30 * MIB, 1));
    let paths: Vec<_> = fs.space_usage().devices.iter().map(|device| device.path.clone().unwrap()).collect();
    assert!(!paths.iter().any(|path| Path::new(path) == images[0]), "{paths:?}");
    close(fs);
}
