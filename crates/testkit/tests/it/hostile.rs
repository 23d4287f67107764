//! Tests hostile input: runs the bodies of the fuzz targets on the kept corpus and on random mutations of it.
//! `fuzz/` runs the bodies with cargo-fuzz.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use ubtrfs_format::KeyType;
use ubtrfs_testkit::hostile::{SeedImage, TARGETS, use_image};
use ubtrfs_testkit::{Medium, Rng};

/// An input that takes longer counts as a hang, even on a slow machine.
const TIME_LIMIT: Duration = Duration::from_secs(60);

fn corpus(target: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target);
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths.into_iter().map(|path| (path.clone(), std::fs::read(path).unwrap())).collect()
}

fn timed(what: &str, body: fn(&[u8]), input: &[u8]) {
    let start = Instant::now();
    body(input);
    assert!(start.elapsed() < TIME_LIMIT, "{what} took {:?}", start.elapsed());
}

#[test]
fn kept_inputs() {
    for (target, body) in TARGETS {
        for (path, input) in corpus(target) {
            println!("{}", path.display());
            timed(target, *body, &input);
        }
    }
}

/// File sizes up to the largest 64-bit number are refused or handled, and never cause a panic.
#[test]
fn absurd_sizes_of_files() {
    for size in [u64::MAX, u64::MAX - 4096, 1 << 63, (1 << 63) - 1, (1 << 62) + 1] {
        let seed = SeedImage::get(0);
        let medium = seed.edited(&|owner| owner == 5, &|key, data| {
            if key.item_type == KeyType::INODE_ITEM && key.objectid > 256 && data.len() == 160 {
                data[16..24].copy_from_slice(&size.to_le_bytes());
            }
        });
        use_image(&medium, "ro");
        use_image(&medium, "");
    }
}

/// A place for a number in the items of one type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    KeyOffset,
    /// Eight bytes of the content, from this offset on.
    Content(usize),
}

/// Returns the places that the items of an image have.
fn places(seed: &SeedImage) -> BTreeSet<(u64, KeyType, Place)> {
    let places = RefCell::new(BTreeSet::new());
    for owner in OWNERS {
        seed.edited(&|of| of == owner, &|key, data| {
            // Some numbers are not at multiples of 4: in a file extent item, those after the byte for the kind; in a
            // directory entry, those after the key.
            let (first, unaligned): (usize, &[usize]) = match key.item_type {
                KeyType::EXTENT_DATA => (16, &[21, 29, 37, 45]),
                KeyType::DIR_ITEM | KeyType::DIR_INDEX => (4, &[9, 17]),
                _ => (data.len().min(440), &[]),
            };
            let mut places = places.borrow_mut();
            places.insert((owner, key.item_type, Place::KeyOffset));
            let contents = (0..first).step_by(4).chain(unaligned.iter().copied()).filter(|at| at + 8 <= data.len());
            places.extend(contents.map(|at| (owner, key.item_type, Place::Content(at))));
        });
    }
    places.into_inner()
}

/// Puts a number into the last item of a type in each leaf, or, if `in_all` is set and the place is not in the key,
/// into all items of the type.
fn with_number(seed: &SeedImage, place: (u64, KeyType, Place), value: u64, in_all: bool) -> Medium {
    let (owner, item_type, place) = place;
    seed.edited_leaves(&|of| of == owner, &|items| {
        let found = items.iter_mut().rev().filter(|(key, _)| key.item_type == item_type);
        let nr_items = if in_all && place != Place::KeyOffset { usize::MAX } else { 1 };
        for (key, data) in found.take(nr_items) {
            match place {
                Place::KeyOffset => key.offset = value,
                Place::Content(at) => {
                    if let Some(field) = data.get_mut(at..at + 8) {
                        field.copy_from_slice(&value.to_le_bytes());
                    }
                }
            }
        }
    })
}

/// Sums of numbers from an image do not wrap: each number of each type of item is set to values near the ends of its
/// range.
#[test]
fn extreme_numbers_in_items() {
    static PANICS: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let before = std::panic::take_hook();
    // Record panics in a hook, because a panic in a thread of the engine does not fail the test by itself. The hook also sees
    // the panics of tests that run beside this one, which the devices of this crate cause.
    std::panic::set_hook(Box::new(move |info| {
        if info.location().is_none_or(|place| !place.file().contains("testkit")) {
            PANICS.lock().unwrap().push(info.to_string());
        }
        before(info);
    }));
    let seed = SeedImage::get(0);
    let mut failed = Vec::new();
    for (round, place) in places(seed).into_iter().enumerate() {
        let start = Instant::now();
        for (nr, value) in EXTREMES.into_iter().enumerate() {
            let medium = with_number(seed, place, value, (round + nr) % 2 == 0);
            let _ = std::panic::catch_unwind(|| use_image(&medium, ""));
            let panics = std::mem::take(&mut *PANICS.lock().unwrap());
            failed.extend(panics.into_iter().map(|panic| format!("{place:?} is {value:#x}: {panic}")));
        }
        assert!(start.elapsed() < TIME_LIMIT, "{place:?} took {:?}", start.elapsed());
    }
    assert!(failed.is_empty(), "{} panics:\n{}", failed.len(), failed.join("\n"));
}

/// Ids of the trees whose items are changed.
const OWNERS: [u64; 7] = [1, 2, 3, 4, 5, 7, 10];
const EXTREMES: [u64; 6] = [u64::MAX, u64::MAX - 1, u64::MAX - 4095, 1 << 63, (1 << 63) - 4096, u64::MAX << 32];

fn random(wanted: &[&str], rounds: usize) {
    let seed = Rng::seed_or(61);
    for (target, body) in TARGETS.iter().filter(|(target, _)| wanted.contains(target)) {
        let kept = corpus(target);
        for round in 0..rounds {
            let mut rng = Rng::new(seed + round as u64);
            println!("{target}: seed {} (UBTRFS_SEED={seed}, round {round})", seed + round as u64);
            let mut input = match kept.is_empty() || rng.one_in(2) {
                true => {
                    let len = 1 + rng.index(8 * (1 + rng.clone().index(12)));
                    rng.bytes(len)
                }
                false => rng.pick(&kept).1.clone(),
            };
            for _ in 0..rng.below(4) {
                if !input.is_empty() {
                    let at = rng.index(input.len());
                    input[at] = rng.next_u64() as u8;
                }
            }
            timed(target, *body, &input);
        }
    }
}

#[test]
fn random_structures() {
    random(&["superblock", "item", "node", "decompress"], 1500);
}

#[test]
fn random_images() {
    random(&["image"], 150);
}

#[test]
fn random_servers() {
    random(&["nbd"], 400);
}

#[test]
fn random_streams() {
    random(&["stream", "receive"], 200);
}

#[test]
fn random_logs() {
    random(&["tree_log"], 150);
}
