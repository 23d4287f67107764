//! Random operations on names, attributes and contents, compared with a model in memory.
//!
//! Method: the testkit's driver predicts each operation with the model, performs it on ubtrfs, and compares the
//! results. Every few hundred operations the driver compares the whole tree. Then the filesystem is closed, checked
//! with `btrfs check`, and opened again with other options. `UBTRFS_SEED` repeats a failure, `UBTRFS_OPS` sets the
//! number of operations of a round.

use anyhow::{Context, Result};
use ubtrfs_testkit::{
    Compare, Driver, FsTarget, Image, LoopMount, Model, Rng, btrfs_check, capability, compare_entries, walk_path,
};

fn nr_ops() -> usize {
    std::env::var("UBTRFS_OPS").ok().and_then(|value| value.parse().ok()).unwrap_or(600)
}

/// Runs rounds of operations on one image, each round with its own mount options.
fn rounds(mkfs: &[&str], options: &[&str], default_seed: u64) -> Result<()> {
    let seed = Rng::seed_or(default_seed);
    let image = Image::kernel_made(768 << 20, mkfs)?;
    let mut model = Model::new();
    let mut driver = Driver::new(seed, 1 << 20);
    for (round, options) in options.iter().enumerate() {
        let context = || format!("seed {seed}, mkfs.btrfs {mkfs:?}, round {round} with '{options}'");
        let mut target = FsTarget::open(image.path(), options).with_context(context)?;
        compare_entries(&model.entries(), &target.walk()?, Compare::MODEL)
            .context("after opening")
            .with_context(context)?;
        for _ in 0..3 {
            driver.run(&mut model, &mut target, nr_ops() / 3).with_context(context)?;
            let found = target.walk().with_context(context)?;
            compare_entries(&model.entries(), &found, Compare::MODEL).with_context(context)?;
        }
        target.close().with_context(context)?;
        btrfs_check(image.path()).with_context(context)?;
    }
    if capability::kernel_oracle() {
        let mount = LoopMount::new(image.path(), "")?;
        mount.scrub()?;
        compare_entries(&model.entries(), &walk_path(mount.path())?, Compare::MODEL).context("under Linux")?;
        mount.close()?;
    }
    Ok(())
}

#[test]
fn default_format() {
    rounds(&[], &["", "noatime", "commit=1", ""], 1).unwrap();
}

#[test]
fn compressed() {
    rounds(&[], &["compress=zstd", "compress-force=lzo", "compress=zlib:9", "compress-force=zstd:-3"], 2).unwrap();
}

#[test]
fn without_copy_on_write() {
    rounds(&[], &["nodatacow", "nodatasum", "compress=lzo", "nodatacow"], 3).unwrap();
}

#[test]
fn small_nodes_and_hole_extents() {
    rounds(&["-n", "4096", "-O", "^no-holes"], &["", "max_inline=0", "compress=zstd"], 4).unwrap();
}

#[test]
fn large_nodes_and_mixed_groups() {
    rounds(&["-n", "65536"], &["max_inline=2k", "compress-force=zlib"], 5).unwrap();
    rounds(&["--mixed"], &["", "compress=zstd"], 6).unwrap();
}

#[test]
fn little_memory() {
    rounds(&["--csum", "xxhash"], &["commit=1", "flushoncommit,commit=1"], 7).unwrap();
}
