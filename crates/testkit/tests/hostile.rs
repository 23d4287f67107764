//! Tests hostile input: runs the bodies of the fuzz targets on the kept corpus and on random mutations of it.
//! `fuzz/` runs the bodies with cargo-fuzz.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ubtrfs_format::KeyType;
use ubtrfs_testkit::Rng;
use ubtrfs_testkit::hostile::{SeedImage, TARGETS, use_image};

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
fn random_streams() {
    random(&["stream", "receive"], 200);
}

#[test]
fn random_logs() {
    random(&["tree_log"], 150);
}
