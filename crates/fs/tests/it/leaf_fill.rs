//! How full leaves are, and how many leaves are written, by the engine's own counters.
//!
//! For 100,000 files in one directory, Linux inserted directory index items in 1,658 batches. After a change to Linux
//! that collects the items of a whole leaf, the number was 839. For ubtrfs, the index items of one leaf count as one
//! batch.

use std::sync::Arc;

use ubtrfs_device::{Device, MemoryDevice};
use ubtrfs_fs::{Caller, Fs, MountOptions, NewInode};
use ubtrfs_mkfs::MkfsOptions;

/// The value of the metric `name` that has the label value `label`. An empty `label` selects the metric without labels.
fn metric(fs: &Fs, name: &str, label: &str) -> f64 {
    let is_it = |metric: &ubtrfs_fs::Metric| {
        metric.full_name() == name
            && match label {
                "" => metric.labels.is_empty(),
                value => metric.labels.iter().any(|(_, own)| own == value),
            }
    };
    fs.metrics().iter().find(|metric| is_it(metric)).map_or(0.0, |metric| metric.value)
}

#[test]
fn files_in_one_directory_and_one_commit_fill_each_leaf_once() {
    const FILES: u64 = 100_000;
    let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(1 << 30));
    ubtrfs_mkfs::make(&*device, &MkfsOptions::default()).unwrap();
    let options = MountOptions { memory_bytes: 2 << 30, commit_secs: 3600, ..MountOptions::default() };
    let fs = Fs::open(vec![device], options).unwrap();
    let dir = fs.create(fs.root(), b"dir", NewInode::dir(0o755), &Caller::ROOT).unwrap().id;
    for index in 0..FILES {
        fs.create(dir, format!("file-{index:010}").as_bytes(), NewInode::file(0o644), &Caller::ROOT).unwrap();
    }
    assert_eq!(metric(&fs, "ubtrfs_phase_seconds_count", "commit"), 0.0, "all is still in memory");
    fs.sync().unwrap();
    assert_eq!(metric(&fs, "ubtrfs_phase_seconds_count", "commit"), 1.0);
    let of_subvolumes = |name: &str| metric(&fs, name, "subvolume");
    let (made, written) =
        (of_subvolumes("ubtrfs_tree_leaves_made_total"), of_subvolumes("ubtrfs_tree_leaves_written_total"));
    let fill = of_subvolumes("ubtrfs_tree_leaf_fill");
    let (batches, items) =
        (metric(&fs, "ubtrfs_dir_index_batches_total", ""), metric(&fs, "ubtrfs_dir_index_items_total", ""));
    println!(
        "leaves: {made} made, {written} written, {:.2}% full; {items} index items in {batches} leaves",
        fill * 100.0
    );
    assert_eq!(made, written, "a leaf was made more than once");
    assert!(fill > 0.95, "leaves are {fill} full");
    assert!(items >= FILES as f64 && batches <= 839.0, "{items} index items in {batches} leaves");
    // At any time, the commit held at most a few pieces of the subvolume's unwritten nodes in memory (2 MiB each), and
    // in addition the nodes of other trees.
    let (waited, all) = (metric(&fs, "ubtrfs_unwritten_nodes_max_bytes", ""), written * 16384.0);
    println!("{waited} bytes of nodes waited at most, {all} were written");
    assert!(waited <= f64::from(12 << 20) && all >= f64::from(32 << 20), "{waited} of {all}");
    fs.close().unwrap();
}

/// Creating a file first looks up its name. All names of a directory that was created in this session stay known, even
/// after many other inodes were created and evicted.
#[test]
fn names_of_a_large_directory_stay_known() {
    let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(1 << 30));
    ubtrfs_mkfs::make(&*device, &MkfsOptions::default()).unwrap();
    let options = MountOptions { memory_bytes: 64 << 20, commit_secs: 3600, ..MountOptions::default() };
    let fs = Fs::open(vec![device], options).unwrap();
    let new_dir = |name: &[u8]| fs.create(fs.root(), name, NewInode::dir(0o755), &Caller::ROOT).unwrap().id;
    let dirs = [new_dir(b"a"), new_dir(b"b"), new_dir(b"c"), new_dir(b"d")];
    let make = |numbers: std::ops::Range<u32>| {
        for number in numbers {
            let dir = dirs[number as usize % dirs.len()];
            let id = fs.create(dir, format!("{number}").as_bytes(), NewInode::file(0o644), &Caller::ROOT).unwrap().id;
            fs.forget(id, 1);
        }
        fs.sync().unwrap();
    };
    make(0..10_000);
    let looked_up =
        || metric(&fs, "ubtrfs_node_cache_hits_total", "") + metric(&fs, "ubtrfs_node_cache_misses_total", "");
    let before = looked_up();
    make(10_000..20_000);
    let lookups = looked_up() - before;
    assert!(lookups < 6_000.0, "{lookups} nodes looked up for 10000 new names");
    fs.close().unwrap();
}
