//! The ioctls on a whole filesystem and on its trees, with Linux's numbers. Each ioctl runs a command of crate
//! `control`. `subvolume_ioctl` has the ioctls on subvolumes.
//!
//! FUSE cannot transport ioctls whose arguments are followed by arrays, or contain pointers or descriptors:
//! TREE_SEARCH_V2, SPACE_INFO, LOGICAL_INO, INO_PATHS, SEND, ENCODED_READ and ENCODED_WRITE. The control socket has
//! commands in place of ioctls that FUSE cannot transport.
//!
//! | ioctl          | argument, with the offsets of its fields                                                     |
//! |----------------|----------------------------------------------------------------------------------------------|
//! | FS_INFO        | max_id 0, num_devices 8, fsid 16, nodesize 32, sectorsize 36, clone_alignment 40, csum_type 44, csum_size 46, flags 48, generation 56, metadata_uuid 64 |
//! | DEV_INFO       | devid 0, uuid 8, bytes_used 24, total_bytes 32, fsid 40, path 3072                             |
//! | INO_LOOKUP     | treeid 0, objectid 8, name 16                                                                |
//! | INO_LOOKUP_USER | dirid 0, treeid 8, name 16, path 272                                                        |
//! | GET_SUBVOL_ROOTREF | min_treeid 0, (treeid, dirid) from 8 on, num_items 4088                                 |
//! | RESIZE         | name 8                                                                                       |
//! | TREE_SEARCH    | tree_id 0, min and max objectid 8, offset 24, transid 40, type 56, nr_items 64, items 104      |

use rustix::io::Errno;
use ubtrfs_control::device::{self, NewSize};
use ubtrfs_control::filesystem::{self, FilesystemInfo};
use ubtrfs_control::search::{self, SearchItem, SearchRange};
use ubtrfs_control::{CommandFailure, Request, Response, Result};
use ubtrfs_fs::Error;

use crate::subvolume_ioctl::{NAME, SubvolumeIoctl, name_of, short, word};

const RESIZE: u32 = 0x5000_9403;
const TREE_SEARCH: u32 = 0xd000_9411;
const INO_LOOKUP: u32 = 0xd000_9412;
const SYNC: u32 = 0x9408;
const WAIT_SYNC: u32 = 0x4008_9416;
const START_SYNC: u32 = 0x8008_9418;
const DEV_INFO: u32 = 0xd000_941e;
const FS_INFO: u32 = 0x8400_941f;
const GET_FSLABEL: u32 = 0x8100_9431;
const SET_FSLABEL: u32 = 0x4100_9432;
const GET_FEATURES: u32 = 0x8018_9439;
const GET_SUBVOL_ROOTREF: u32 = 0xd000_943d;
const INO_LOOKUP_USER: u32 = 0xd000_943e;

/// An ioctl's answer: data, and a result, which may be a negative error number.
#[derive(Debug, Default)]
pub(crate) struct IoctlAnswer {
    pub(crate) data: Vec<u8>,
    pub(crate) result: i32,
}

impl From<Vec<u8>> for IoctlAnswer {
    fn from(data: Vec<u8>) -> Self {
        Self { data, result: 0 }
    }
}

/// Answers an ioctl; `None` if this module does not handle the ioctl.
pub(crate) fn ioctl(command: &SubvolumeIoctl<'_>, cmd: u32, data: &[u8]) -> Option<Result<IoctlAnswer>> {
    Some(match cmd {
        SYNC => sync(command).map(|()| IoctlAnswer::default()),
        // Unlike on Linux, START_SYNC waits: the answer is sent when the transaction is durable.
        START_SYNC => {
            sync(command).and_then(|()| info(command)).map(|info| info.generation.to_le_bytes().to_vec().into())
        }
        WAIT_SYNC => wait_sync(command, data).map(|()| IoctlAnswer::default()),
        GET_FEATURES => info(command).map(|info| {
            let flags = [info.compat_flags, info.compat_ro_flags, info.incompat_flags];
            flags.map(u64::to_le_bytes).as_flattened().to_vec().into()
        }),
        FS_INFO => info(command).map(|info| fs_info(&info).into()),
        DEV_INFO => dev_info(command, data).map(IoctlAnswer::from),
        GET_FSLABEL => info(command).map(|info| padded(info.label, LABEL_LEN).into()),
        SET_FSLABEL => set_label(command, data).map(|()| IoctlAnswer::default()),
        INO_LOOKUP => ino_lookup(command, data).map(IoctlAnswer::from),
        INO_LOOKUP_USER => ino_lookup_user(command, data).map(IoctlAnswer::from),
        GET_SUBVOL_ROOTREF => root_refs(command, data),
        RESIZE => resize(command, data).map(|()| IoctlAnswer::default()),
        TREE_SEARCH => tree_search(command, data).map(IoctlAnswer::from),
        _ => return None,
    })
}

fn whole(command: &SubvolumeIoctl<'_>, request: filesystem::Request) -> Result<filesystem::Response> {
    match command.run(Request::Filesystem(request))? {
        Response::Filesystem(response) => Ok(response),
        _ => Err(other_answer()),
    }
}

fn search(command: &SubvolumeIoctl<'_>, request: search::Request) -> Result<search::Response> {
    match command.run(Request::Search(request))? {
        Response::Search(response) => Ok(response),
        _ => Err(other_answer()),
    }
}

pub(crate) fn other_answer() -> CommandFailure {
    CommandFailure::new(Errno::IO, "unexpected answer")
}

/// Waits until a transaction is durable; transid 0 means the running one.
fn wait_sync(command: &SubvolumeIoctl<'_>, data: &[u8]) -> Result<()> {
    let transid = data.first_chunk().map(|bytes| u64::from_le_bytes(*bytes)).ok_or_else(|| no_transaction(0))?;
    let committed = info(command)?.generation;
    match transid {
        0 => sync(command),
        _ if transid <= committed => Ok(()),
        _ if transid == committed.saturating_add(1) => sync(command),
        _ => Err(no_transaction(transid)),
    }
}

fn no_transaction(transid: u64) -> CommandFailure {
    CommandFailure::new(Errno::INVAL, format!("there is no transaction {transid} yet"))
}

fn sync(command: &SubvolumeIoctl<'_>) -> Result<()> {
    whole(command, filesystem::Request::Sync).map(|_| ())
}

fn info(command: &SubvolumeIoctl<'_>) -> Result<FilesystemInfo> {
    match whole(command, filesystem::Request::Info)? {
        filesystem::Response::Info(info) => Ok(info),
        _ => Err(other_answer()),
    }
}

fn fs_info(info: &FilesystemInfo) -> Vec<u8> {
    let mut out = Vec::with_capacity(FS_INFO_LEN);
    out.extend(info.max_devid.to_le_bytes());
    out.extend(info.num_devices.to_le_bytes());
    out.extend(info.fsid.as_bytes());
    for size in [info.nodesize, info.sectorsize, info.sectorsize] {
        out.extend(size.to_le_bytes());
    }
    out.extend(info.csum_type.to_le_bytes());
    out.extend(info.csum_size.to_le_bytes());
    // FUSE does not pass on which fields the caller requests, so the answer has all fields.
    const ALL_FIELDS: u64 = 7;
    out.extend(ALL_FIELDS.to_le_bytes());
    out.extend(info.generation.to_le_bytes());
    out.extend(info.metadata_uuid.as_bytes());
    padded(out, FS_INFO_LEN)
}

fn dev_info(command: &SubvolumeIoctl<'_>, data: &[u8]) -> Result<Vec<u8>> {
    let devid = word(data)?;
    let uuid: &[u8; 16] = data.get(8..).and_then(<[u8]>::first_chunk).ok_or_else(short)?;
    let filesystem::Response::Usage(usage) = whole(command, filesystem::Request::Usage)? else {
        return Err(other_answer());
    };
    let is_it = |device: &&filesystem::DeviceInfo| {
        device.devid == devid && (*uuid == [0; 16] || device.uuid.as_bytes() == uuid)
    };
    let missing = || CommandFailure::new(Errno::NODEV, "no such device");
    let device = usage.devices.iter().find(is_it).ok_or_else(missing)?;
    let mut out = device.devid.to_le_bytes().to_vec();
    out.extend(device.uuid.as_bytes());
    out.extend(device.allocated.to_le_bytes());
    out.extend(device.total.to_le_bytes());
    out.extend(info(command)?.fsid.as_bytes());
    out.resize(DEV_PATH, 0);
    let path = device.path.as_deref().unwrap_or_default().as_bytes();
    out.extend(&path[..path.len().min(ARGS_LEN - DEV_PATH - 1)]);
    Ok(padded(out, ARGS_LEN))
}

fn set_label(command: &SubvolumeIoctl<'_>, data: &[u8]) -> Result<()> {
    let end = data.iter().position(|byte| *byte == 0);
    let unended = || Error::InvalidArgument("label without a terminating zero");
    let label = data.get(..end.ok_or_else(unended)?).unwrap_or_default().to_vec();
    whole(command, filesystem::Request::SetLabel { label }).map(|_| ())
}

fn resize(command: &SubvolumeIoctl<'_>, data: &[u8]) -> Result<()> {
    let request = match name_of(data, NAME)? {
        b"cancel" => device::Request::CancelResize,
        size => parse_resize(size).ok_or(Error::InvalidArgument("a size"))?,
    };
    command.run(Request::Device(request)).map(|_| ())
}

/// Parses `[DEVID:][+|-]SIZE` or `[DEVID:]max`; a size is a number, optionally with a letter that multiplies it by a
/// power of 1024.
fn parse_resize(text: &[u8]) -> Option<device::Request> {
    let text = std::str::from_utf8(text).ok()?;
    let (devid, size) = match text.split_once(':') {
        Some((devid, size)) => (devid.parse().ok()?, size),
        None => (1, text),
    };
    let bytes = |size: &str| {
        let digits = size.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let shift = match size[digits.len()..].to_ascii_lowercase().as_str() {
            "" => 0,
            "k" => 10,
            "m" => 20,
            "g" => 30,
            "t" => 40,
            "p" => 50,
            "e" => 60,
            _ => return None,
        };
        digits.parse::<u64>().ok()?.checked_mul(1 << shift)
    };
    let to = match size.strip_prefix('+').map(|more| (true, more)).or(size.strip_prefix('-').map(|less| (false, less)))
    {
        _ if size == "max" => NewSize::Max,
        Some((true, more)) => NewSize::Add(bytes(more)?),
        Some((false, less)) => NewSize::Sub(bytes(less)?),
        None => NewSize::To(bytes(size)?),
    };
    Some(device::Request::Resize { devid, to })
}

fn ino_lookup(command: &SubvolumeIoctl<'_>, data: &[u8]) -> Result<Vec<u8>> {
    let (tree, inode) = (word(data)?, word(data.get(8..).unwrap_or_default())?);
    let search::Response::Path { tree, mut path } =
        search(command, search::Request::Path { tree: (tree != 0).then_some(tree), inode })?
    else {
        return Err(other_answer());
    };
    if !path.is_empty() {
        path.push(b'/');
    }
    let mut out = [tree, inode].map(u64::to_le_bytes).as_flattened().to_vec();
    fits(&path, ARGS_LEN - out.len())?;
    out.extend(path);
    Ok(padded(out, ARGS_LEN))
}

fn ino_lookup_user(command: &SubvolumeIoctl<'_>, data: &[u8]) -> Result<Vec<u8>> {
    let (dirid, subvolume) = (word(data)?, word(data.get(8..).unwrap_or_default())?);
    let search::Response::Child { name, mut path } =
        search(command, search::Request::Child { below: 0, subvolume, dirid })?
    else {
        return Err(other_answer());
    };
    if !path.is_empty() {
        path.push(b'/');
    }
    let mut out = [dirid, subvolume].map(u64::to_le_bytes).as_flattened().to_vec();
    fits(&name, SUBVOLUME_NAME_LEN)?;
    out.extend(name);
    let mut out = padded(out, USER_PATH);
    fits(&path, ARGS_LEN - USER_PATH)?;
    out.extend(path);
    Ok(padded(out, ARGS_LEN))
}

fn root_refs(command: &SubvolumeIoctl<'_>, data: &[u8]) -> Result<IoctlAnswer> {
    let from = word(data)?;
    let search::Response::Children(children) = search(command, search::Request::Children { of: 0, from })? else {
        return Err(other_answer());
    };
    let shown = &children[..children.len().min(ROOT_REFS)];
    let is_all = shown.len() == children.len();
    let next = shown.last().map_or(from, |(id, _)| id.saturating_add(1));
    let mut out = next.to_le_bytes().to_vec();
    for (id, dirid) in shown {
        out.extend([*id, *dirid].map(u64::to_le_bytes).as_flattened());
    }
    out.resize(ROOT_REFS_COUNT, 0);
    out.push(u8::try_from(shown.len()).unwrap_or(u8::MAX));
    // EOVERFLOW means that there are more subvolumes than the answer contains.
    Ok(IoctlAnswer { data: padded(out, ARGS_LEN), result: if is_all { 0 } else { -Errno::OVERFLOW.raw_os_error() } })
}

fn tree_search(command: &SubvolumeIoctl<'_>, data: &[u8]) -> Result<Vec<u8>> {
    let head = data.get(..SEARCH_HEAD).ok_or_else(short)?;
    let at = |offset: usize| word(head.get(offset..).unwrap_or_default());
    let small = |offset: usize| {
        let bytes = head.get(offset..).and_then(<[u8]>::first_chunk::<4>).ok_or_else(short)?;
        Ok::<_, CommandFailure>(u32::from_le_bytes(*bytes))
    };
    // Item types above 255 match no item.
    let (min_type, max_type) = (small(56)?, small(60)?);
    let tree = at(0)?;
    let Ok(min_type) = u8::try_from(min_type) else { return Ok(found(head, &[])) };
    let range = SearchRange {
        tree: (tree != 0).then_some(tree),
        min: (at(8)?, min_type, at(24)?),
        max: (at(16)?, u8::try_from(max_type).unwrap_or(u8::MAX), at(32)?),
        generations: (at(40)?, at(48)?),
        nr_items: small(64)?,
        len_bytes: SEARCH_LEN,
    };
    match search(command, search::Request::Items(range))? {
        search::Response::Items(items) => Ok(found(head, &items)),
        _ => Err(other_answer()),
    }
}

/// The answer of TREE_SEARCH: the request with the number of items filled in, then each item after its header.
fn found(head: &[u8], items: &[SearchItem]) -> Vec<u8> {
    let mut out = head.to_vec();
    out[64..68].copy_from_slice(&u32::try_from(items.len()).unwrap_or(0).to_le_bytes());
    for item in items {
        let (objectid, item_type, offset) = item.key;
        out.extend([item.generation, objectid, offset].map(u64::to_le_bytes).as_flattened());
        out.extend(u32::from(item_type).to_le_bytes());
        out.extend(u32::try_from(item.bytes.len()).unwrap_or(0).to_le_bytes());
        out.extend(&item.bytes);
    }
    padded(out, ARGS_LEN)
}

/// Fails if the text and a terminating zero do not fit into `room` bytes.
fn fits(text: &[u8], room: usize) -> Result<()> {
    if text.len() < room { Ok(()) } else { Err(Error::NameTooLong.into()) }
}

pub(crate) fn padded(mut bytes: Vec<u8>, len: usize) -> Vec<u8> {
    bytes.resize(len, 0);
    bytes
}

/// Length of the argument of most ioctls.
const ARGS_LEN: usize = 4096;
const FS_INFO_LEN: usize = 1024;
const LABEL_LEN: usize = 256;
const DEV_PATH: usize = 3072;
const USER_PATH: usize = 272;
const SUBVOLUME_NAME_LEN: usize = 256;
const ROOT_REFS: usize = 255;
const ROOT_REFS_COUNT: usize = 4088;
const SEARCH_HEAD: usize = 104;
/// Room for items in the argument of TREE_SEARCH.
const SEARCH_LEN: u32 = 3992;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_linux_reads_them() {
        let resize = |devid, to| Some(device::Request::Resize { devid, to });
        assert_eq!(parse_resize(b"max"), resize(1, NewSize::Max));
        assert_eq!(parse_resize(b"2:+1G"), resize(2, NewSize::Add(1 << 30)));
        assert_eq!(parse_resize(b"-4096"), resize(1, NewSize::Sub(4096)));
        assert_eq!(parse_resize(b"1:3m"), resize(1, NewSize::To(3 << 20)));
        for wrong in [&b""[..], b"+", b"x", b":", b"1:", b"1x", b"+-1", b"99999999999E", b"\xff", b"17179869184G"] {
            assert_eq!(parse_resize(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn found_items_lie_behind_the_request() {
        let item = SearchItem { generation: 7, key: (256, 84, 9), bytes: b"abc".to_vec() };
        let out = found(&[1; SEARCH_HEAD], &[item.clone(), item]);
        let at = |offset: usize| u64::from_le_bytes(*out[offset..].first_chunk().unwrap());
        assert_eq!((out.len(), &out[64..68]), (ARGS_LEN, &[2, 0, 0, 0][..]));
        assert_eq!((at(104), at(112), at(120), &out[128..139]), (7, 256, 9, &b"\x54\0\0\0\x03\0\0\0abc"[..]));
        assert_eq!((at(139), &out[171..175]), (7, &b"abc\0"[..]));
    }
}
