//! Leaf items as text: inodes, names, files, extents, roots. Volumes and quotas are in [`super::volume`].

use std::fmt::{self, Write};

use super::text::{escaped_line, flags, time};
use super::{KeyText, ObjectidText, PrintOptions, PrintStop, Printed, volume};
use crate::error::FormatError;
use crate::item::{
    Compression, DirItem, ExtentFlags, ExtentItem, FileExtent, FileType, InlineRef, InodeExtref, InodeFlags, InodeItem,
    InodeRef, RegularExtent, RootFlags, RootItem, RootRef,
};
use crate::key::{Key, KeyType};
use crate::node::{HEADER_SIZE, NodeView};

/// Prints an item; an undecodable item prints as an error.
pub(super) fn print_item(view: &NodeView<'_>, slot: usize, options: &PrintOptions, out: &mut dyn Write) -> fmt::Result {
    let (Some(key), Some(range)) = (view.key(slot), view.item_range(slot)) else {
        return writeln!(out, "\titem {slot} corrupt: its data lies outside the block");
    };
    let offset = range.start.saturating_sub(HEADER_SIZE);
    writeln!(out, "\titem {slot} key {} itemoff {offset} itemsize {}", KeyText(&key), range.len())?;
    match print_content(&key, view.item(slot).unwrap_or_default(), options, out) {
        Ok(()) => Ok(()),
        Err(PrintStop::Write(error)) => Err(error),
        Err(PrintStop::Item(cause)) => writeln!(out, "\t\tcorrupt: {cause}"),
    }
}

fn print_content(key: &Key, data: &[u8], options: &PrintOptions, out: &mut dyn Write) -> Printed {
    match key.item_type {
        KeyType::INODE_ITEM => print_inode(&InodeItem::decode(data)?, out),
        KeyType::INODE_REF => print_inode_refs(data, options, out),
        KeyType::INODE_EXTREF => print_inode_extrefs(data, options, out),
        KeyType::DIR_ITEM | KeyType::DIR_INDEX | KeyType::XATTR_ITEM => print_dir_entries(data, options, out),
        KeyType::DIR_LOG_ITEM | KeyType::DIR_LOG_INDEX => {
            Ok(writeln!(out, "\t\tdir log end {}", u64_of("DirLogItem", data)?)?)
        }
        KeyType::ORPHAN_ITEM => Ok(writeln!(out, "\t\torphan item")?),
        KeyType::EXTENT_DATA => print_file_extent(data, out),
        KeyType::EXTENT_CSUM => print_csums(key, data, options, out),
        KeyType::ROOT_ITEM => print_root(data, out),
        KeyType::ROOT_REF => print_root_ref("ref", data, options, out),
        KeyType::ROOT_BACKREF => print_root_ref("backref", data, options, out),
        KeyType::EXTENT_ITEM | KeyType::METADATA_ITEM => print_extent(key, data, out),
        KeyType::TREE_BLOCK_REF => Ok(writeln!(out, "\t\ttree block backref")?),
        KeyType::SHARED_BLOCK_REF => Ok(writeln!(out, "\t\tshared block backref")?),
        KeyType::SHARED_DATA_REF => {
            let count = InlineRef::decode_keyed(key, data)?.count();
            Ok(writeln!(out, "\t\tshared data backref count {count}")?)
        }
        KeyType::EXTENT_DATA_REF | KeyType::EXTENT_OWNER_REF => {
            Ok(print_extent_ref(&InlineRef::decode_keyed(key, data)?, out)?)
        }
        _ => volume::print_content(key, data, out),
    }
}

pub(super) fn u64_of(what: &'static str, data: &[u8]) -> Result<u64, FormatError> {
    crate::codec::Reader::new(what, data).array().map(u64::from_le_bytes)
}

fn name(bytes: &[u8], options: &PrintOptions) -> String {
    if options.hide_names { "HIDDEN".to_owned() } else { escaped_line(bytes) }
}

const INODE_FLAGS: [(u64, &str); 12] = [
    (InodeFlags::NODATASUM.bits(), "NODATASUM"),
    (InodeFlags::NODATACOW.bits(), "NODATACOW"),
    (InodeFlags::READONLY.bits(), "READONLY"),
    (InodeFlags::NOCOMPRESS.bits(), "NOCOMPRESS"),
    (InodeFlags::PREALLOC.bits(), "PREALLOC"),
    (InodeFlags::SYNC.bits(), "SYNC"),
    (InodeFlags::IMMUTABLE.bits(), "IMMUTABLE"),
    (InodeFlags::APPEND.bits(), "APPEND"),
    (InodeFlags::NODUMP.bits(), "NODUMP"),
    (InodeFlags::NOATIME.bits(), "NOATIME"),
    (InodeFlags::DIRSYNC.bits(), "DIRSYNC"),
    (InodeFlags::COMPRESS.bits(), "COMPRESS"),
];

fn print_inode(inode: &InodeItem, out: &mut dyn Write) -> Printed {
    let InodeItem { generation, transid, size, nbytes, block_group, nlink, uid, gid, mode, rdev, sequence, .. } = inode;
    writeln!(out, "\t\tgeneration {generation} transid {transid} size {size} nbytes {nbytes}")?;
    writeln!(out, "\t\tblock group {block_group} mode {mode:o} links {nlink} uid {uid} gid {gid} rdev {rdev}")?;
    let names = flags(inode.flags, &INODE_FLAGS, "none");
    writeln!(out, "\t\tsequence {sequence} flags 0x{:x}({names})", inode.flags)?;
    for (name, at) in
        [("atime", &inode.atime), ("ctime", &inode.ctime), ("mtime", &inode.mtime), ("otime", &inode.otime)]
    {
        writeln!(out, "\t\t{name} {}", time(at))?;
    }
    Ok(())
}

fn print_inode_refs(data: &[u8], options: &PrintOptions, out: &mut dyn Write) -> Printed {
    for InodeRef { index, name: bytes } in InodeRef::decode_all(data)? {
        writeln!(out, "\t\tindex {index} namelen {} name: {}", bytes.len(), name(&bytes, options))?;
    }
    Ok(())
}

fn print_inode_extrefs(data: &[u8], options: &PrintOptions, out: &mut dyn Write) -> Printed {
    for InodeExtref { parent, index, name: bytes } in InodeExtref::decode_all(data)? {
        let name = name(&bytes, options);
        writeln!(out, "\t\tindex {index} parent {parent} namelen {} name: {name}", bytes.len())?;
    }
    Ok(())
}

fn print_dir_entries(data: &[u8], options: &PrintOptions, out: &mut dyn Write) -> Printed {
    for entry in DirItem::decode_all(data)? {
        let DirItem { location, transid, file_type, name: bytes, data } = entry;
        let file_type = match FileType::from_disk(file_type) {
            Some(FileType::Regular) => "FILE".to_owned(),
            Some(FileType::Directory) => "DIR".to_owned(),
            Some(FileType::CharDevice) => "CHRDEV".to_owned(),
            Some(FileType::BlockDevice) => "BLKDEV".to_owned(),
            Some(FileType::Fifo) => "FIFO".to_owned(),
            Some(FileType::Socket) => "SOCK".to_owned(),
            Some(FileType::Symlink) => "SYMLINK".to_owned(),
            Some(FileType::Xattr) => "XATTR".to_owned(),
            None => format!("DIR_ITEM.{file_type}"),
        };
        writeln!(out, "\t\tlocation key {} type {file_type}", KeyText(&location))?;
        writeln!(out, "\t\ttransid {transid} data_len {} name_len {}", data.len(), bytes.len())?;
        writeln!(out, "\t\tname: {}", name(&bytes, options))?;
        if !data.is_empty() {
            writeln!(out, "\t\tdata {}", name(&data, options))?;
        }
    }
    Ok(())
}

/// Prints a file extent item, even if its compression or its type is unknown.
fn print_file_extent(data: &[u8], out: &mut dyn Write) -> Printed {
    let mut reader = crate::codec::Reader::new("FileExtent", data);
    let head: [u8; FileExtent::HEADER_SIZE] = reader.array()?;
    let generation = u64_of("FileExtent", &head)?;
    let ram_bytes = u64_of("FileExtent", head.get(8..).unwrap_or_default())?;
    let [.., compression, _encryption, _other0, _other1, kind] = head;
    let compression_name = match Compression::from_disk(compression) {
        Some(known) => known.name().to_owned(),
        None => format!("UNKNOWN.{compression}"),
    };
    let compression = format!("compression {compression} ({compression_name})");
    let kind_name = match kind {
        0 => "inline",
        1 => "regular",
        2 => "prealloc",
        _ => "unknown",
    };
    writeln!(out, "\t\tgeneration {generation} type {kind} ({kind_name})")?;
    if kind == 0 {
        let size = reader.rest().len();
        return Ok(writeln!(out, "\t\tinline extent data size {size} ram_bytes {ram_bytes} {compression}")?);
    }
    let RegularExtent { disk_bytenr, disk_num_bytes, offset, num_bytes } = RegularExtent::decode(reader.rest())?;
    let what = if kind == 2 { "prealloc" } else { "extent" };
    writeln!(out, "\t\t{what} data disk byte {disk_bytenr} nr {disk_num_bytes}")?;
    write!(out, "\t\t{what} data offset {offset} nr {num_bytes}")?;
    if kind == 2 {
        return Ok(writeln!(out)?);
    }
    Ok(writeln!(out, " ram {ram_bytes}\n\t\textent {compression}")?)
}

fn print_csums(key: &Key, data: &[u8], options: &PrintOptions, out: &mut dyn Write) -> Printed {
    let size = options.csum_type.size();
    let nr_csums = data.len().checked_div(size).and_then(|count| u64::try_from(count).ok()).unwrap_or_default();
    let (start, length) = (key.offset, nr_csums.saturating_mul(options.sectorsize.into()));
    writeln!(out, "\t\trange start {start} end {} length {length}", start.saturating_add(length))?;
    if !options.csum_items {
        return Ok(());
    }
    let mut at = start;
    // A line holds 16 bytes of checksums; a longer checksum has a line of its own.
    for row in data.chunks(size.saturating_mul(16usize.checked_div(size).unwrap_or_default().max(1))) {
        let mut texts = Vec::new();
        for csum in row.chunks_exact(size) {
            texts.push(format!("[{at}] {}", super::text::csum(csum, options.csum_type)));
            at = at.saturating_add(options.sectorsize.into());
        }
        writeln!(out, "\t\t{}", texts.join(" "))?;
    }
    Ok(())
}

fn print_root(data: &[u8], out: &mut dyn Write) -> Printed {
    // Do not use `decode_any`, which replaces a `generation_v2` that differs from `generation`.
    let mut padded = data.to_vec();
    if data.len() >= RootItem::SIZE_V1 {
        padded.resize(RootItem::SIZE.max(data.len()), 0);
    }
    let root = RootItem::decode(&padded)?;
    let RootItem { generation, root_dirid, bytenr, byte_limit, bytes_used, last_snapshot, refs, .. } = &root;
    write!(out, "\t\tgeneration {generation} root_dirid {root_dirid} bytenr {bytenr} ")?;
    writeln!(out, "byte_limit {byte_limit} bytes_used {bytes_used}")?;
    let names = flags(root.flags, &[(RootFlags::RDONLY.bits(), "RDONLY")], "none");
    writeln!(out, "\t\tlast_snapshot {last_snapshot} flags 0x{:x}({names}) refs {refs}", root.flags)?;
    writeln!(out, "\t\tdrop_progress key {} drop_level {}", KeyText(&root.drop_progress), root.drop_level)?;
    writeln!(out, "\t\tlevel {} generation_v2 {}", root.level, root.generation_v2)?;
    if root.generation != root.generation_v2 {
        return Ok(());
    }
    writeln!(out, "\t\tuuid {}", root.uuid)?;
    writeln!(out, "\t\tparent_uuid {}", root.parent_uuid)?;
    writeln!(out, "\t\treceived_uuid {}", root.received_uuid)?;
    let RootItem { ctransid, otransid, stransid, rtransid, .. } = &root;
    writeln!(out, "\t\tctransid {ctransid} otransid {otransid} stransid {stransid} rtransid {rtransid}")?;
    for (name, at) in [("ctime", &root.ctime), ("otime", &root.otime), ("stime", &root.stime), ("rtime", &root.rtime)] {
        writeln!(out, "\t\t{name} {}", time(at))?;
    }
    Ok(())
}

fn print_root_ref(what: &str, data: &[u8], options: &PrintOptions, out: &mut dyn Write) -> Printed {
    let RootRef { dirid, sequence, name: bytes } = RootRef::decode(data)?;
    let name = name(&bytes, options);
    Ok(writeln!(out, "\t\troot {what} key dirid {dirid} sequence {sequence} name {name}")?)
}

fn print_extent(key: &Key, data: &[u8], out: &mut dyn Write) -> Printed {
    let ExtentItem { refs, generation, flags: bits, tree_block, inline_refs } =
        ExtentItem::decode(key.item_type, data)?;
    let names = [
        (ExtentFlags::DATA.bits(), "DATA"),
        (ExtentFlags::TREE_BLOCK.bits(), "TREE_BLOCK"),
        (ExtentFlags::FULL_BACKREF.bits(), "FULL_BACKREF"),
    ];
    writeln!(out, "\t\trefs {refs} gen {generation} flags {}", flags(bits.bits(), &names, ""))?;
    if let Some(info) = tree_block {
        writeln!(out, "\t\ttree block key {} level {}", KeyText(&info.key), info.level)?;
    }
    if key.item_type == KeyType::METADATA_ITEM {
        writeln!(out, "\t\ttree block skinny level {}", key.offset)?;
    }
    for inline in &inline_refs {
        print_extent_ref(inline, out)?;
    }
    Ok(())
}

fn print_extent_ref(extent_ref: &InlineRef, out: &mut dyn Write) -> fmt::Result {
    match extent_ref {
        InlineRef::TreeBlock(root) => writeln!(out, "\t\ttree block backref root {}", ObjectidText(root.0)),
        InlineRef::SharedBlock(parent) => writeln!(out, "\t\tshared block backref parent {parent}"),
        InlineRef::ExtentData(data) => {
            let (root, objectid, offset) = (ObjectidText(data.root.0), data.objectid, data.offset);
            write!(out, "\t\textent data backref root {root} objectid {objectid} offset {offset} ")?;
            writeln!(out, "count {}", data.count)
        }
        InlineRef::SharedData { parent, count } => {
            writeln!(out, "\t\tshared data backref parent {parent} count {count}")
        }
        InlineRef::Owner(root) => writeln!(out, "\t\textent owner root {}", ObjectidText(root.0)),
    }
}
