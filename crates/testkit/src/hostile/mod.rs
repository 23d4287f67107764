//! Hostile input: the bodies of the fuzz targets, which the ordinary test suite also runs on the kept corpus.
//!
//! Each function accepts any bytes and must return. Errors are expected. A panic, a hang, or more memory than the
//! input's size justifies is a finding.
//!
//! - I1. Work is bounded: a walk of a crafted filesystem visits at most [`MAX_ENTRIES`] names and reads about
//!   [`MAX_READ`] bytes.

mod lies;
mod nbd;
mod seed_image;
mod stream;

use std::sync::Arc;

use anyhow::Result;
use ubtrfs_device::Device;
use ubtrfs_format::item::Compression;
use ubtrfs_format::node::{LeafBuilder, NodeHeader, NodeView, finish_block};
use ubtrfs_format::print::{PrintOptions, print_node, print_superblock};
use ubtrfs_format::superblock::{SUPERBLOCK_SIZE, Superblock};
use ubtrfs_format::{CheckContext, Generation, Key, KeyType, Logical, RootId, check_node, check_superblock};
use ubtrfs_fs::{Fs, InodeId, Job, MountOptions, SendRequest};

use crate::{FsTarget, Medium, MediumDevice, NodeKind, Rng, Target};

pub use nbd::nbd;
pub use seed_image::{Mutation, SeedImage};
pub use stream::{for_each_command, mend_checksums, receive, stream};

/// The largest number of names that a walk visits.
pub const MAX_ENTRIES: usize = 3000;
/// The number of bytes after which a walk stops reading.
pub const MAX_READ: usize = 16 << 20;

/// The body of a fuzz target.
pub type Body = fn(&[u8]);

/// The fuzz targets by name.
pub const TARGETS: &[(&str, Body)] = &[
    ("superblock", superblock),
    ("item", item),
    ("node", node),
    ("decompress", decompress),
    ("image", image),
    ("tree_log", tree_log),
    ("stream", stream),
    ("receive", receive),
    ("nbd", nbd),
];

/// Decodes, checks and prints a superblock, then opens an image with it.
pub fn superblock(data: &[u8]) {
    let seed = SeedImage::get(0);
    let mut raw = seed.superblock();
    // A short input patches a good superblock with (offset, value) pairs.
    if data.len() < SUPERBLOCK_SIZE {
        for patch in data.chunks_exact(3) {
            let at = usize::from(u16::from_le_bytes([patch[0], patch[1]])) % SUPERBLOCK_SIZE;
            raw[at] = patch[2];
        }
    } else {
        raw.copy_from_slice(&data[..SUPERBLOCK_SIZE]);
    }
    if let Ok(decoded) = Superblock::decode(&raw) {
        let _ = check_superblock(&decoded, &raw);
        let again = decoded.encode_with_csum();
        assert_eq!(again.len(), SUPERBLOCK_SIZE);
    }
    let mut text = String::new();
    let _ = print_superblock(&raw, true, &mut text);
    let mut medium = seed.medium();
    seed_image::put_superblock(&mut medium, raw);
    use_image(&medium, "ro");
    use_image(&medium, "");
}

/// Decodes a leaf with one item. The input is the item's key and content.
pub fn item(data: &[u8]) {
    let Some((head, content)) = data.split_at_checked(18) else { return };
    let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|n| head[at + n]));
    // Most inputs use an existing item type.
    const TYPES: &[u8] = &[
        1, 12, 13, 24, 36, 37, 48, 60, 72, 84, 96, 108, 128, 132, 144, 156, 168, 169, 172, 176, 178, 180, 182, 184,
        192, 198, 199, 200, 204, 216, 228, 240, 242, 244, 246, 248, 249, 250, 251, 252,
    ];
    let item_type = if head[0] % 4 == 0 { head[1] } else { TYPES[usize::from(head[1]) % TYPES.len()] };
    let key = Key::new(word(2), KeyType(item_type), word(10));
    let owner = RootId([5, 1, 2, 3, 4, 7, 10, 11, 256, 8, 9][usize::from(head[0] >> 4) % 11]);
    let seed = SeedImage::get(0);
    let sb = seed.superblock_decoded();
    let mut leaf = LeafBuilder::new(sb.nodesize as usize);
    if !leaf.push(&key, content) {
        return;
    }
    let header = NodeHeader {
        fsid: sb.node_fsid(),
        chunk_tree_uuid: sb.fsid,
        bytenr: Logical(1 << 20),
        generation: Generation(1),
        owner,
        level: 0,
        flags: 0,
    };
    let mut raw = leaf.finish(&header);
    finish_block(&mut raw, sb.csum_type().unwrap_or_default());
    look_at_node(&raw, &sb);
}

/// Makes a tree block from the input, gives the block a valid checksum, and decodes it.
pub fn node(data: &[u8]) {
    let seed = SeedImage::get(0);
    let sb = seed.superblock_decoded();
    let mut raw = vec![0; sb.nodesize as usize];
    let len = data.len().min(raw.len());
    raw[..len].copy_from_slice(&data[..len]);
    if data.len() < 600 {
        // A short input patches a good block with (offset, value) pairs.
        raw = seed.some_block(data.first().copied().unwrap_or(0).into());
        for patch in data.get(1..).unwrap_or_default().chunks_exact(3) {
            let at = usize::from(u16::from_le_bytes([patch[0], patch[1]])) % raw.len();
            raw[at] = patch[2];
        }
    }
    finish_block(&mut raw, sb.csum_type().unwrap_or_default());
    look_at_node(&raw, &sb);
}

fn look_at_node(raw: &[u8], sb: &Superblock) {
    let context = CheckContext::new(sb);
    let checked = check_node(raw, &context);
    let reading = check_node(raw, &context.for_reading_only(true));
    assert!(checked.is_err() || reading.is_ok(), "what can be written can be read");
    let mut text = String::new();
    let _ = print_node(raw, &PrintOptions::new(sb), &mut text);
    if let Ok(view) = NodeView::new(raw) {
        for slot in 0..view.nritems().min(4096) {
            let _ = (view.key(slot), view.item(slot), view.child(slot));
        }
        let _ = view.search(&Key::new(256, KeyType(1), 0));
    }
}

/// Decompresses an extent. The input is the method, the decompressed length, and the stream.
pub fn decompress(data: &[u8]) {
    let Some((head, stream)) = data.split_at_checked(4) else { return };
    let kind = [Compression::Zlib, Compression::Lzo, Compression::Zstd][usize::from(head[0]) % 3];
    let len = usize::from(u16::from_le_bytes([head[1], head[2]])) * 2 + usize::from(head[3] % 3);
    let mut out = vec![0xaa; len];
    let _ = ubtrfs_fs::decompress(kind, stream, &mut out, 4096);
}

/// Uses a filesystem with wrong content and valid checksums: mutations of an image that Linux made.
pub fn image(data: &[u8]) {
    let Some((&first, program)) = data.split_first() else { return };
    let seed = SeedImage::get(usize::from(first) % SeedImage::COUNT);
    let medium = seed.mutated(program, &|_| true);
    use_image(&medium, "ro");
    use_image(&medium, "");
}

/// Uses a filesystem with a log to replay. The log has wrong content. For one in four inputs, the other trees have
/// wrong content too.
pub fn tree_log(data: &[u8]) {
    let seed = SeedImage::with_log();
    let in_log = |owner: u64| owner == RootId::TREE_LOG.0;
    let medium = match data.split_first() {
        Some((first, program)) if first % 4 > 0 => seed.mutated(program, &in_log),
        Some((_, program)) => seed.mutated(program, &|_| true),
        None => return,
    };
    use_image(&medium, "ro");
    use_image(&medium, "");
}

/// Checks an image, opens it, and reads its content. If `options` is empty, also changes the filesystem, commits, and
/// checks the resulting image.
pub fn use_image(medium: &Medium, options: &str) {
    let device = Arc::new(MediumDevice::new(medium.clone()));
    let _ = check(device.clone());
    let _ = use_filesystem(device.clone(), options);
    if options.is_empty() {
        let _ = check(device);
    }
}

fn check(device: Arc<dyn Device>) -> Result<()> {
    let options = ubtrfs_check::Options { data_csums: true, ..Default::default() };
    ubtrfs_check::check(vec![device], options, &(), &mut |problem| drop(problem.to_string()))?;
    Ok(())
}

fn use_filesystem(device: Arc<dyn Device>, options: &str) -> Result<()> {
    let mut options = MountOptions::parse(options)?;
    options.memory_bytes = 64 << 20;
    let read_only = options.read_only;
    let target = FsTarget::on_device(device, options)?;
    let mut target = target;
    let names = walk(&target);
    if read_only {
        return target.close();
    }
    let fs = Arc::clone(target.fs());
    let _ = fs.snapshot(fs.root().root, fs.root(), b"sent0", true);
    let mut rng = Rng::new(1);
    let _ = target.create(b"new", NodeKind::File, 0o644, (0, 0));
    let _ = target.write(b"new", 0, &rng.bytes(70_000));
    for name in names.iter().take(24) {
        match rng.below(5) {
            0 => drop(target.write(name, rng.below(20_000), &rng.bytes(5000))),
            1 => drop(target.truncate(name, 100)),
            2 => drop(target.unlink(name)),
            3 => drop(target.rename(name, b"renamed", crate::RenameOp::Replace)),
            _ => drop(target.set_xattr(name, b"user.fuzz", b"value")),
        }
    }
    if let Some(name) = names.first() {
        let _ = target.fsync(name);
    }
    let _ = target.sync();
    let _ = target.fs().statfs();
    let _ = fs.snapshot(fs.root().root, fs.root(), b"sent1", true);
    send(&fs);
    target.close()
}

/// Sends the snapshot `sent1` whole, as an increment to `sent0`, and with `sent0` as a clone source, in versions 1 and
/// 2 of the stream. Also lists the differences between both snapshots, and what `find_new` finds in `sent1`.
fn send(fs: &Fs) {
    let list = fs.subvolumes().unwrap_or_default();
    let found = |name: &[u8]| list.iter().find(|info| info.path.ends_with(name)).map(|info| info.id);
    let (Some(old), Some(new)) = (found(b"sent0"), found(b"sent1")) else { return };
    for (parent, clone_sources) in [(None, vec![]), (Some(old), vec![]), (None, vec![old])] {
        for version in [1, 2] {
            let (clone_sources, compressed_data) = (clone_sources.clone(), version > 1);
            let (subvolumes, no_data, joined) = (vec![new], false, false);
            let request = SendRequest { subvolumes, parent, clone_sources, version, compressed_data, no_data, joined };
            let _ = fs.send(&request, &mut std::io::sink(), &Job::new());
        }
    }
    let _ = fs.changes_between(old, new, &Job::new(), &mut |_| Ok(()));
    let _ = fs.find_new(new, ubtrfs_format::Generation(0), &Job::new(), &mut |_| Ok(()));
}

/// Visits the names of a filesystem and reads file content, up to the limits of I1. Returns some of the paths.
fn walk(target: &FsTarget) -> Vec<Vec<u8>> {
    let fs = target.fs();
    let mut paths = Vec::new();
    let mut stack: Vec<(Vec<u8>, InodeId)> = vec![(Vec::new(), fs.root())];
    let (mut visited, mut read) = (0, 0);
    let mut buf = vec![0; 64 << 10];
    while let Some((path, id)) = stack.pop() {
        visited += 1;
        if visited > MAX_ENTRIES {
            break;
        }
        let Ok(attr) = fs.getattr(id) else { continue };
        let _ = fs.readlink(id);
        for name in fs.listxattr(id).unwrap_or_default().iter().take(50) {
            let _ = fs.getxattr(id, name);
        }
        if attr.is_dir() {
            let mut children = Vec::new();
            let mut cookie = 0;
            for _ in 0..8 {
                let before = cookie;
                let listed = fs.readdir(id, cookie, &mut |entry| {
                    cookie = entry.next_cookie;
                    if entry.name != b"." && entry.name != b".." {
                        children.push((crate::tree_entry::join(&path, entry.name), entry.id));
                    }
                    children.len() < MAX_ENTRIES
                });
                if listed.is_err() || cookie == before {
                    break;
                }
            }
            for (child, _) in &children {
                let name = child.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
                let _ = fs.lookup(id, name);
            }
            if path.len() < 2000 {
                stack.extend(children);
            }
            continue;
        }
        paths.push(path);
        let mut at = 0;
        while read < MAX_READ && at < attr.size {
            match fs.seek(id, at, ubtrfs_fs::SeekWhence::Data) {
                Ok(data) if data >= at => at = data,
                _ => break,
            }
            let count = fs.read_into(id, at, &mut buf).unwrap_or(0);
            read += buf.len();
            at += (count as u64).max(4096);
        }
    }
    paths
}
