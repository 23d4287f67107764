//! Tree blocks and superblocks as JSON. Numbers appear as on disk; keys and owners also as text with well-known names.
//!
//! Names that are not UTF-8 are escaped as in the text form, and also given in hex ([`insert_name`]).

use serde_json::{Value, json};

use super::superblock::{COMPAT_RO, INCOMPAT, SUPER_FLAGS, sys_chunks};
use super::text::is_hidden;
use super::{KeyText, ObjectidText, PrintOptions, block_group_flags, escaped};
use crate::csum::CsumType;
use crate::error::FormatError;
use crate::ids::{DevId, Generation, Ino, Logical, Physical, RootId, objectid};
use crate::item::{
    BlockGroupFlags, BlockGroupItem, ChunkItem, DevExtent, DevItem, DevStatsItem, DirItem, ExtentItem, FileExtent,
    FileExtentBody, FreeSpaceHeader, FreeSpaceInfo, InlineRef, InodeExtref, InodeItem, InodeRef, QgroupInfo,
    QgroupLimit, QgroupStatus, RootItem, RootRef, Stripe,
};
use crate::key::{Key, KeyType};
use crate::node::{HEADER_SIZE, ITEM_HEAD_SIZE, KEY_PTR_SIZE, NodeView, hex};
use crate::superblock::{MAGIC, RootBackup, SUPERBLOCK_SIZE, Superblock};

/// A value that can be converted to JSON.
pub trait ToJson {
    /// The value as JSON.
    fn to_json(&self) -> Value;
}

macro_rules! number_json {
    ($($number:ty),*) => {$(
        impl ToJson for $number {
            fn to_json(&self) -> Value {
                json!(self)
            }
        }
    )*};
}
number_json!(u8, u16, u32, u64, i64);

macro_rules! id_json {
    ($($id:ident),*) => {$(
        impl ToJson for $id {
            fn to_json(&self) -> Value {
                json!(self.0)
            }
        }
    )*};
}
id_json!(Logical, Physical, RootId, Ino, DevId, Generation);

impl ToJson for uuid::Uuid {
    fn to_json(&self) -> Value {
        json!(self.to_string())
    }
}

impl<const N: usize> ToJson for [u64; N] {
    fn to_json(&self) -> Value {
        json!(&self[..])
    }
}

impl<const N: usize> ToJson for [u8; N] {
    fn to_json(&self) -> Value {
        json!(hex(self))
    }
}

impl ToJson for [RootBackup; 4] {
    fn to_json(&self) -> Value {
        self.iter().map(ToJson::to_json).collect()
    }
}

impl ToJson for Key {
    fn to_json(&self) -> Value {
        let Self { objectid, item_type, offset } = self;
        json!({ "objectid": objectid, "type": item_type.0, "offset": offset, "text": KeyText(self).to_string() })
    }
}

impl ToJson for ChunkItem {
    fn to_json(&self) -> Value {
        let Self { length, owner, stripe_len, flags, io_align, io_width, sector_size, sub_stripes, stripes } = self;
        json!({
            "length": length,
            "owner": owner,
            "stripe_len": stripe_len,
            "type": flags.bits(),
            "type_text": block_group_flags(*flags),
            "io_align": io_align,
            "io_width": io_width,
            "sector_size": sector_size,
            "num_stripes": stripes.len(),
            "sub_stripes": sub_stripes,
            "stripes": stripes.iter().map(Stripe::to_json).collect::<Value>(),
        })
    }
}

/// A tree block as JSON.
pub fn node_json(raw: &[u8], options: &PrintOptions) -> Value {
    let view = match NodeView::new(raw) {
        Ok(view) => view,
        Err(cause) => return json!({ "error": cause.to_string() }),
    };
    let mut node = json!({
        "bytenr": view.bytenr().0,
        "level": view.level(),
        "nritems": view.nritems(),
        "generation": view.generation().0,
        "owner": view.owner().0,
        "owner_text": ObjectidText(view.owner().0).to_string(),
        "flags": view.flags(),
        "backref_revision": view.backref_rev(),
        "fsid": view.fsid().to_string(),
        "chunk_tree_uuid": view.chunk_tree_uuid().to_string(),
        "csum": hex(view.csum().get(..options.csum_type.size()).unwrap_or_default()),
    });
    let (name, head_size) = if view.is_leaf() { ("items", ITEM_HEAD_SIZE) } else { ("children", KEY_PTR_SIZE) };
    let fit = raw.len().saturating_sub(HEADER_SIZE).checked_div(head_size).unwrap_or_default();
    let slots = 0..view.nritems().min(fit);
    let content: Value = if view.is_leaf() {
        slots.map(|slot| item_json(&view, slot, options)).collect()
    } else {
        slots.filter_map(|slot| child_json(&view, slot)).collect()
    };
    insert(&mut node, name, content);
    node
}

fn insert(object: &mut Value, name: &str, value: Value) {
    if let Some(object) = object.as_object_mut() {
        object.insert(name.to_owned(), value);
    }
}

fn child_json(view: &NodeView<'_>, slot: usize) -> Option<Value> {
    let (bytenr, generation) = view.child(slot)?;
    Some(json!({ "key": view.key(slot)?.to_json(), "bytenr": bytenr.0, "generation": generation.0 }))
}

fn item_json(view: &NodeView<'_>, slot: usize, options: &PrintOptions) -> Value {
    let (Some(key), Some(range)) = (view.key(slot), view.item_range(slot)) else {
        return json!({ "slot": slot, "error": "its data lies outside the block" });
    };
    let mut item = json!({
        "slot": slot,
        "key": key.to_json(),
        "itemoff": range.start.saturating_sub(HEADER_SIZE),
        "itemsize": range.len(),
    });
    match content_json(&key, view.item(slot).unwrap_or_default(), options) {
        Ok(Value::Null) => {}
        Ok(content) => insert(&mut item, "content", content),
        Err(cause) => insert(&mut item, "error", json!(cause.to_string())),
    }
    item
}

/// Adds a name or path to an object. If it is not UTF-8, the field holds it escaped, and a second field with the suffix
/// `_hex` holds its bytes.
pub fn insert_name(object: &mut Value, field: &str, bytes: &[u8]) {
    let name = match std::str::from_utf8(bytes) {
        Ok(name) => name.to_owned(),
        Err(_) => {
            insert(object, &format!("{field}_hex"), json!(hex(bytes)));
            escaped(bytes)
        }
    };
    insert(object, field, json!(name));
}

/// Adds a list of names to an object, as [`insert_name`] adds one. If any of them is not UTF-8, the field with the suffix
/// `_hex` holds the bytes of all of them.
pub fn insert_names<'n>(object: &mut Value, field: &str, names: impl Iterator<Item = &'n [u8]> + Clone) {
    if names.clone().any(|name| std::str::from_utf8(name).is_err()) {
        insert(object, &format!("{field}_hex"), names.clone().map(hex).collect());
    }
    let text = |name: &[u8]| std::str::from_utf8(name).map_or_else(|_| escaped(name), str::to_owned);
    insert(object, field, names.map(text).collect());
}

/// Formats JSON in one line. Unlike the text of `serde_json`, it holds no control characters above U+007E and no format
/// characters, which terminals obey too.
pub fn json_line(value: &Value) -> String {
    without_controls(&value.to_string())
}

/// Formats JSON in several lines, otherwise as [`json_line`] does.
pub fn json_lines(value: &Value) -> String {
    without_controls(&format!("{value:#}"))
}

/// Escapes control and format characters from U+007F. In JSON, they occur only inside of strings.
fn without_controls(json: &str) -> String {
    let mut text = String::with_capacity(json.len());
    for c in json.chars() {
        match is_hidden(c) && (!c.is_ascii() || c == '\u{7f}') {
            true => c.encode_utf16(&mut [0; 2]).iter().for_each(|unit| text.push_str(&format!("\\u{unit:04x}"))),
            false => text.push(c),
        }
    }
    text
}

/// Adds a name to an object, unless the options hide names.
fn with_name(mut object: Value, field: &str, bytes: &[u8], options: &PrintOptions) -> Value {
    match options.hide_names {
        true => insert(&mut object, field, json!("HIDDEN")),
        false => insert_name(&mut object, field, bytes),
    }
    object
}

fn content_json(key: &Key, data: &[u8], options: &PrintOptions) -> Result<Value, FormatError> {
    Ok(match key.item_type {
        KeyType::INODE_ITEM => InodeItem::decode(data)?.to_json(),
        KeyType::INODE_REF => {
            let names = InodeRef::decode_all(data)?;
            names.iter().map(|name| with_name(json!({ "index": name.index }), "name", &name.name, options)).collect()
        }
        KeyType::INODE_EXTREF => {
            let object = |name: &InodeExtref| json!({ "parent": name.parent, "index": name.index });
            let names = InodeExtref::decode_all(data)?;
            names.iter().map(|name| with_name(object(name), "name", &name.name, options)).collect()
        }
        KeyType::DIR_ITEM | KeyType::DIR_INDEX | KeyType::XATTR_ITEM => {
            DirItem::decode_all(data)?.iter().map(|entry| dir_entry_json(entry, options)).collect()
        }
        KeyType::DIR_LOG_ITEM | KeyType::DIR_LOG_INDEX => json!({ "end": super::item::u64_of("DirLogItem", data)? }),
        KeyType::EXTENT_DATA => file_extent_json(&FileExtent::decode(data)?),
        KeyType::EXTENT_CSUM => csums_json(key, data, options),
        KeyType::ROOT_ITEM => RootItem::decode_any(data)?.to_json(),
        KeyType::ROOT_REF | KeyType::ROOT_BACKREF => {
            let RootRef { dirid, sequence, name } = RootRef::decode(data)?;
            with_name(json!({ "dirid": dirid, "sequence": sequence }), "name", &name, options)
        }
        KeyType::EXTENT_ITEM | KeyType::METADATA_ITEM => extent_json(&ExtentItem::decode(key.item_type, data)?),
        KeyType::TREE_BLOCK_REF
        | KeyType::SHARED_BLOCK_REF
        | KeyType::SHARED_DATA_REF
        | KeyType::EXTENT_DATA_REF
        | KeyType::EXTENT_OWNER_REF => extent_ref_json(&InlineRef::decode_keyed(key, data)?),
        KeyType::BLOCK_GROUP_ITEM => {
            let item = BlockGroupItem::decode(data)?;
            let mut object = item.to_json();
            let flags = BlockGroupFlags::from_bits_retain(item.flags);
            insert(&mut object, "flags_text", json!(block_group_flags(flags)));
            object
        }
        KeyType::CHUNK_ITEM => ChunkItem::decode(data)?.to_json(),
        KeyType::DEV_ITEM => DevItem::decode(data)?.to_json(),
        KeyType::DEV_EXTENT => DevExtent::decode(data)?.to_json(),
        KeyType::FREE_SPACE_INFO => FreeSpaceInfo::decode(data)?.to_json(),
        KeyType::FREE_SPACE_BITMAP => json!({ "bitmap": hex(data) }),
        KeyType::QGROUP_STATUS => QgroupStatus::decode(data)?.to_json(),
        KeyType::QGROUP_INFO => QgroupInfo::decode(data)?.to_json(),
        KeyType::QGROUP_LIMIT => QgroupLimit::decode(data)?.to_json(),
        KeyType::PERSISTENT_ITEM if key.objectid == objectid::DEV_STATS => DevStatsItem::decode(data)?.to_json(),
        KeyType::UUID_KEY_SUBVOL | KeyType::UUID_KEY_RECEIVED_SUBVOL => {
            let ids = data.chunks(8).map(|id| super::item::u64_of("UuidItem", id));
            json!({ "subvol_ids": ids.collect::<Result<Vec<_>, _>>()? })
        }
        KeyType(0) if key.objectid == objectid::FREE_SPACE => FreeSpaceHeader::decode(data)?.to_json(),
        _ if data.is_empty() => Value::Null,
        _ => json!({ "data": hex(data) }),
    })
}

fn dir_entry_json(entry: &DirItem, options: &PrintOptions) -> Value {
    let DirItem { location, transid, file_type, name, data } = entry;
    let object = json!({ "location": location.to_json(), "transid": transid.0, "type": file_type });
    let mut object = with_name(object, "name", name, options);
    if !data.is_empty() {
        object = with_name(object, "data", data, options);
    }
    object
}

fn file_extent_json(extent: &FileExtent) -> Value {
    let mut object = json!({
        "generation": extent.generation.0,
        "ram_bytes": extent.ram_bytes,
        "compression": extent.compression.to_disk(),
        "encryption": extent.encryption,
        "other_encoding": extent.other_encoding,
    });
    match &extent.body {
        FileExtentBody::Inline(data) => {
            insert(&mut object, "type", json!("inline"));
            insert(&mut object, "inline_bytes", json!(data.len()));
        }
        FileExtentBody::Regular(regular) | FileExtentBody::Prealloc(regular) => {
            let is_regular = matches!(extent.body, FileExtentBody::Regular(_));
            insert(&mut object, "type", json!(if is_regular { "regular" } else { "prealloc" }));
            for (name, value) in regular.to_json().as_object().into_iter().flatten() {
                insert(&mut object, name, value.clone());
            }
        }
    }
    object
}

fn csums_json(key: &Key, data: &[u8], options: &PrintOptions) -> Value {
    let size = options.csum_type.size();
    let nr_csums = data.len().checked_div(size).and_then(|count| u64::try_from(count).ok()).unwrap_or_default();
    let mut object = json!({ "start": key.offset, "length": nr_csums.saturating_mul(u64::from(options.sectorsize)) });
    if options.csum_items {
        insert(&mut object, "csums", data.chunks_exact(size).map(|csum| json!(hex(csum))).collect());
    }
    object
}

fn extent_json(item: &ExtentItem) -> Value {
    let mut object = json!({
        "refs": item.refs,
        "generation": item.generation.0,
        "flags": item.flags.bits(),
        "inline_refs": item.inline_refs.iter().map(extent_ref_json).collect::<Value>(),
    });
    if let Some(info) = &item.tree_block {
        insert(&mut object, "tree_block", info.to_json());
    }
    object
}

fn extent_ref_json(extent_ref: &InlineRef) -> Value {
    let kind = extent_ref.key_type();
    let mut object = match extent_ref {
        InlineRef::TreeBlock(root) | InlineRef::Owner(root) => json!({ "root": root.0 }),
        InlineRef::SharedBlock(parent) => json!({ "parent": parent.0 }),
        InlineRef::ExtentData(data) => data.to_json(),
        InlineRef::SharedData { parent, count } => json!({ "parent": parent.0, "count": count }),
    };
    insert(&mut object, "type", json!(kind.0));
    insert(&mut object, "type_text", json!(kind.name()));
    object
}

/// A superblock as JSON.
pub fn superblock_json(raw: &[u8]) -> Value {
    let superblock = match Superblock::decode(raw) {
        Ok(superblock) => superblock,
        Err(cause) => return json!({ "error": cause.to_string() }),
    };
    let mut object = superblock.to_json();
    let csum_type = superblock.csum_type();
    let size = csum_type.map_or(superblock.csum.len(), CsumType::size);
    let csum = superblock.csum.get(..size).unwrap_or_default();
    let csum_matches = match (csum_type, raw.get(32..SUPERBLOCK_SIZE)) {
        (Some(known), Some(body)) => known.compute(body).get(..size) == Some(csum),
        _ => false,
    };
    insert(&mut object, "csum", json!(hex(csum)));
    insert(&mut object, "csum_matches", json!(csum_matches));
    insert(&mut object, "csum_type_text", json!(csum_type.map(CsumType::name)));
    insert(&mut object, "magic", json!(escaped(&superblock.magic)));
    insert(&mut object, "magic_matches", json!(superblock.magic == MAGIC));
    insert_name(&mut object, "label", superblock.label());
    insert(&mut object, "flags_text", names_json(superblock.flags, &SUPER_FLAGS));
    insert(&mut object, "compat_ro_flags_text", names_json(superblock.compat_ro_flags, &COMPAT_RO));
    insert(&mut object, "incompat_flags_text", names_json(superblock.incompat_flags, &INCOMPAT));
    let chunks = sys_chunks(&superblock).map(|chunk| match chunk {
        Ok((key, chunk)) => json!({ "key": key.to_json(), "chunk": chunk.to_json() }),
        Err(cause) => json!({ "error": cause.to_string() }),
    });
    insert(&mut object, "sys_chunk_array", chunks.collect());
    if let Some(object) = object.as_object_mut() {
        let _: [Option<Value>; 2] = [object.remove("padding"), object.remove("reserved")];
    }
    object
}

fn names_json(bits: u64, names: &[(u64, &str)]) -> Value {
    names.iter().filter(|(bit, _)| bits & bit != 0).map(|(_, name)| json!(name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_gives_names_exactly_and_has_no_control_characters() {
        let invisible = "\u{202e}\u{2028}\u{e0041}\\ \u{e4}".as_bytes();
        let controls = "\u{7f}\u{9b}2J \u{e4}".as_bytes();
        for name in [&b"plain"[..], b"\x1b[2J\n", controls, invisible, b"\xff\x1b", b"a\\xff", b""] {
            let mut object = json!({});
            insert_name(&mut object, "path", name);
            insert_names(&mut object, "list", [name, b"x"].into_iter());
            for text in [json_line(&object), json_lines(&object)] {
                assert!(!text.chars().any(|c| is_hidden(c) && c != '\n') && !text.contains('\u{fffd}'), "{text}");
                let read: Value = serde_json::from_str(&text).unwrap();
                assert_eq!(read, object);
                match read["path_hex"].as_str() {
                    Some(of) => assert_eq!((of, &read["list_hex"]), (&*hex(name), &json!([hex(name), hex(b"x")]))),
                    None => assert_eq!(read["path"].as_str().unwrap().as_bytes(), name),
                }
            }
        }
    }
}
