//! Tests that the checker finds damage in every image in which `btrfs check` finds damage.
//!
//! By default, 120 damaged images in 4 formats are compared. This command compares 1,000 damaged images in 11 formats:
//! `UBTRFS_CORRUPT=1000 cargo test --release -p ubtrfs-check --test it corrupt -- --nocapture`.

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::Arc;

use ubtrfs_check::{Code, Options, Problem};
use ubtrfs_device::{Access, Device, FileDevice};
use ubtrfs_testkit::{
    Corruption, Corruptor, Image, KernelImage, KernelImageSpec, LoopMount, Rng, btrfs_check_output, capability, run,
};

/// Makes a small image with hard links, xattrs, symbolic links, a snapshot, files without names and a log. One of three
/// images also has quotas.
fn base(spec: KernelImageSpec, seed: u64) -> Image {
    let made = KernelImage::empty(KernelImageSpec { len_bytes: 256 << 20, ..spec }).unwrap();
    let mount = LoopMount::new(made.image.path(), made.spec.mount).unwrap();
    let mut rng = Rng::new(seed);
    for dir in 0..8 {
        let dir = mount.join(format!("dir-{dir}"));
        std::fs::create_dir(&dir).unwrap();
        for file in 0..60 {
            let path = dir.join(format!("file-{file}"));
            let len = rng.len(40_000) as usize;
            std::fs::write(&path, rng.content(len)).unwrap();
            if file % 9 == 0 {
                std::fs::hard_link(&path, dir.join(format!("link-{file}"))).unwrap();
            }
            if file % 11 == 0 {
                let value = rng.bytes(20);
                set_xattr(&path, &value);
            }
            if file % 13 == 0 {
                std::os::unix::fs::symlink("somewhere", dir.join(format!("symlink-{file}"))).unwrap();
            }
        }
    }
    let path = |name: &str| mount.join(name).to_string_lossy().into_owned();
    if rng.one_in(3) {
        mount.enable_quota().unwrap();
    }
    run("btrfs", ["subvolume", "create", &path("subvolume")]).unwrap();
    for file in 0..100 {
        std::fs::write(mount.join(format!("subvolume/file-{file}")), rng.content(9000)).unwrap();
    }
    run("btrfs", ["subvolume", "snapshot", &path("subvolume"), &path("snapshot")]).unwrap();
    for file in 0..40 {
        std::fs::write(mount.join(format!("subvolume/file-{}", file * 2)), rng.content(3000)).unwrap();
        std::fs::remove_file(mount.join(format!("snapshot/file-{file}"))).unwrap();
    }
    // The image is copied while these files without names are open, as a power cut would leave it.
    let open: Vec<std::fs::File> = (0..3)
        .map(|file| {
            let path = mount.join(format!("dir-0/file-{file}"));
            let open = std::fs::File::open(&path).unwrap();
            std::fs::remove_file(&path).unwrap();
            open
        })
        .collect();
    run("btrfs", ["filesystem", "sync", &path("")]).unwrap();
    // Also make a log that has to be replayed.
    for file in 0..3 {
        let mut synced = std::fs::File::create(mount.join(format!("dir-1/synced-{file}"))).unwrap();
        synced.write_all(&rng.content(30_000)).unwrap();
        synced.sync_all().unwrap();
    }
    let image = Image::copy_of(made.image.path()).unwrap();
    drop(open);
    mount.close().unwrap();
    image
}

fn set_xattr(path: &std::path::Path, value: &[u8]) {
    let hex: String = value.iter().map(|byte| format!("{byte:02x}")).collect();
    run("setfattr", ["-n", "user.attribute", "-v", &format!("0x{hex}"), &path.to_string_lossy()]).unwrap();
}

/// Whether our checker finds a problem; an image that cannot be opened counts as damaged.
fn ours(image: &Image, lines: &mut Vec<String>) -> bool {
    let device: Arc<dyn Device> = Arc::new(FileDevice::open(image.path(), Access::ReadOnly).unwrap());
    let options = Options { data_csums: true, ..Options::default() };
    let mut tell = |problem: Problem| lines.push(problem.to_string());
    match ubtrfs_check::check(vec![device], options, &(), &mut tell) {
        // Some versions of mkfs.btrfs leave stale entries in the free space tree of every image.
        Ok(report) => !report.is_clean() || report.counts.keys().any(|code| *code != Code::FreeSpaceStale),
        Err(error) => {
            lines.push(format!("cannot be checked: {error}"));
            true
        }
    }
}

#[derive(Default)]
struct Tally {
    tried: usize,
    theirs: usize,
    both: usize,
    ours_alone: usize,
}

#[test]
fn damage_that_btrfs_check_finds_is_found() {
    if !capability::kernel_oracle() || !capability::program("setfattr") {
        return;
    }
    let seed = Rng::seed_or(1);
    let wanted: usize = std::env::var("UBTRFS_CORRUPT").ok().and_then(|text| text.parse().ok()).unwrap_or(120);
    println!("seed {seed}, {wanted} damaged images");
    let mut rng = Rng::new(seed);
    let mut specs = vec!["default", "nodes of 4 KiB", "hole extents", "no skinny metadata, no extrefs"];
    if wanted >= 200 {
        specs.extend(["single", "mixed", "dup data", "nodes of 64 KiB", "block group tree", "no free space tree"]);
        specs.push("space cache v1, hole extents");
    }
    let mut missed = Vec::new();
    let mut tallies: BTreeMap<Corruption, Tally> = BTreeMap::new();
    let mut ways = Corruption::ALL.iter().cycle();
    let mut done = 0;
    let per_base = wanted.div_ceil(specs.len());
    for spec in specs {
        let image = base(KernelImageSpec::named(spec), rng.next_u64());
        let mut clean = Vec::new();
        assert!(!ours(&image, &mut clean), "{spec}: {}", clean.join("\n"));
        let corruptor = Corruptor::new(&image).unwrap();
        let until = (done + per_base).min(wanted);
        let mut in_vain = 0;
        while done < until && in_vain < 1000 {
            let way = *ways.next().unwrap();
            let Some(damage) = corruptor.apply(way, &mut rng).unwrap() else {
                in_vain += 1;
                continue;
            };
            done += 1;
            let mut lines = Vec::new();
            let found = ours(&image, &mut lines);
            let (success, mut said) =
                btrfs_check_output(&image_path(&image), &["--readonly", "--check-data-csum"]).unwrap();
            let mut theirs = !success || complains(&said);
            if !theirs {
                // Also ask the lowmem mode of `btrfs check`, which finds other problems.
                (theirs, said) = lowmem_finds(&image);
            }
            let tally = tallies.entry(way).or_default();
            tally.tried += 1;
            tally.theirs += usize::from(theirs);
            tally.both += usize::from(theirs && found);
            tally.ours_alone += usize::from(found && !theirs);
            if theirs && !found {
                missed.push(format!("{spec}: {way}: {}\n{said}", damage.text));
            }
            damage.undo(&image).unwrap();
        }
        let mut clean = Vec::new();
        assert!(!ours(&image, &mut clean), "{spec}, damage undone: {}", clean.join("\n"));
    }
    let (mut theirs, mut alone) = (0, 0);
    for (way, tally) in &tallies {
        let Tally { tried, theirs: t, both, ours_alone } = tally;
        println!(
            "{way:<20} tried {tried:4}, btrfs check finds {t:4}, ours of these {both:4}, ours alone {ours_alone:4}"
        );
        theirs += t;
        alone += ours_alone;
    }
    println!(
        "{done} images, {} ways: btrfs check finds {theirs}, missed {}, ours alone {alone}",
        tallies.len(),
        missed.len()
    );
    assert!(missed.is_empty(), "{} missed:\n{}", missed.len(), missed.join("\n\n"));
}

/// The check of an image with several kinds of damage comes to an end. The test does not require that the damage is
/// found, because one kind of damage can hide the effect of another.
#[test]
fn checking_ends_on_much_damage() {
    if !capability::kernel_oracle() || !capability::program("setfattr") {
        return;
    }
    let seed = Rng::seed_or(1);
    let wanted: usize = std::env::var("UBTRFS_CORRUPT").ok().and_then(|text| text.parse().ok()).unwrap_or(100);
    println!("seed {seed}");
    let mut rng = Rng::new(seed ^ 77);
    let (mut slowest, mut undetected) = (std::time::Duration::ZERO, 0);
    for spec in ["default", "nodes of 4 KiB", "hole extents"] {
        let image = base(KernelImageSpec::named(spec), rng.next_u64());
        let corruptor = Corruptor::new(&image).unwrap();
        for _ in 0..wanted.div_ceil(3) {
            let mut damages = Vec::new();
            for _ in 0..=rng.below(12) {
                let way = *rng.pick(Corruption::ALL);
                let way = if rng.one_in(2) { Corruption::BitFlip } else { way };
                damages.extend(corruptor.apply(way, &mut rng).unwrap());
            }
            let started = std::time::Instant::now();
            undetected += usize::from(!ours(&image, &mut Vec::new()));
            slowest = slowest.max(started.elapsed());
            damages.into_iter().rev().for_each(|damage| damage.undo(&image).unwrap());
        }
    }
    println!("{wanted} heaps of damage, {undetected} not noticed, slowest {slowest:?}");
}

fn image_path(image: &Image) -> std::path::PathBuf {
    image.path().to_owned()
}

/// Whether the lowmem mode finds damage, and its output. A crash does not count as finding damage.
fn lowmem_finds(image: &Image) -> (bool, String) {
    let (success, said) = btrfs_check_output(image.path(), &["--readonly", "--mode=lowmem"]).unwrap();
    (!success && said.contains("error(s) found"), said)
}

/// Whether the output of `btrfs check` contains a complaint that is not printed for a clean image.
fn complains(text: &str) -> bool {
    let words = ["error", "mismatch", "corrupt", "invalid", "missing", "wrong", "unresolved", "bad ", "errors "];
    text.lines().any(|line| {
        let line = line.to_lowercase();
        let harmless = line.contains("no error found") || line.contains("cache and super generation don't match");
        !harmless && words.iter().any(|word| line.contains(word))
    })
}
