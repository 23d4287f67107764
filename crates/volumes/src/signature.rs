//! Detects the content of a device by the magic numbers of common formats, and wipes the magic numbers.

use ubtrfs_device::Device;
use ubtrfs_error::{Error, Result};
use ubtrfs_format::superblock::{MAGIC, MAGIC_OFFSET, SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE};

struct Signature {
    name: &'static str,
    offset: u64,
    magic: &'static [u8],
}

const fn signature(name: &'static str, offset: u64, magic: &'static [u8]) -> Signature {
    Signature { name, offset, magic }
}

/// Formats with their magic numbers, taken from each format's documentation.
const SIGNATURES: [Signature; 34] = [
    signature("a btrfs filesystem", SUPERBLOCK_OFFSETS[0] + MAGIC_OFFSET as u64, &MAGIC),
    signature("an ext2, ext3 or ext4 filesystem", 1024 + 56, b"\x53\xef"),
    signature("an XFS filesystem", 0, b"XFSB"),
    signature("an F2FS filesystem", 1024, b"\x10\x20\xf5\xf2"),
    signature("a bcachefs filesystem", 4096 + 24, b"\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef"),
    signature("a bcache device", 4096 + 24, b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81"),
    signature("an NTFS filesystem", 3, b"NTFS    "),
    signature("an exFAT filesystem", 3, b"EXFAT   "),
    signature("a FAT filesystem", 54, b"FAT12   "),
    signature("a FAT filesystem", 54, b"FAT16   "),
    signature("a FAT filesystem", 82, b"FAT32   "),
    signature("a ReiserFS filesystem", 65536 + 52, b"ReIsEr"),
    signature("a JFS filesystem", 32768, b"JFS1"),
    signature("a NILFS2 filesystem", 1024 + 6, b"\x34\x34"),
    signature("an OCFS2 filesystem", 8192, b"OCFSV2"),
    signature("a GFS2 filesystem", 65536, b"\x01\x16\x19\x70"),
    signature("an HFS+ filesystem", 1024, b"H+"),
    signature("an HFSX filesystem", 1024, b"HX"),
    signature("an APFS container", 32, b"NXSB"),
    signature("a ZFS pool member", 128 << 10, b"\x0c\xb1\xba\x00"),
    signature("a SquashFS image", 0, b"hsqs"),
    signature("an EROFS image", 1024, b"\xe2\xe1\xf5\xe0"),
    signature("an ISO 9660 image", 32769, b"CD001"),
    signature("a UDF image", 32769, b"BEA01"),
    signature("swap space", 4096 - 10, b"SWAPSPACE2"),
    signature("swap space", 4096 - 10, b"SWAP-SPACE"),
    signature("a hibernation image", 4096 - 10, b"S1SUSPEND"),
    signature("an encrypted volume (LUKS)", 0, b"LUKS\xba\xbe"),
    signature("an LVM physical volume", 512 + 24, b"LVM2 001"),
    signature("an MD RAID member", 0, b"\xfc\x4e\x2b\xa9"),
    signature("an MD RAID member", 4096, b"\xfc\x4e\x2b\xa9"),
    signature("a partition table (GPT)", 512, b"EFI PART"),
    signature("a qcow2 image", 0, b"QFI\xfb"),
    signature("a partition table or boot sector", 510, b"\x55\xaa"),
];

/// Returns a name for the device's content, such as "an XFS filesystem". `None` if no known format is found.
pub fn detect(device: &dyn Device) -> Result<Option<&'static str>> {
    let len = SUPERBLOCK_OFFSETS[0].saturating_mul(3).min(device.len_bytes());
    let mut head = vec![0; usize::try_from(len).unwrap_or_default()];
    read(device, 0, &mut head)?;
    let stands = |signature: &&Signature| {
        let from = usize::try_from(signature.offset).ok().and_then(|start| head.get(start..));
        from.is_some_and(|from| from.starts_with(signature.magic))
    };
    Ok(SIGNATURES.iter().find(stands).map(|signature| signature.name))
}

/// Bytes zeroed at each end of the device. The magic numbers of all known formats lie in these bytes.
const WIPED: u64 = 1 << 20;

/// Zeroes both ends of the first `total_bytes`, and all superblock mirrors on the device, also those after
/// `total_bytes`. The change is durable on return. After a wipe, [`detect`] no longer finds the old content.
pub fn wipe(device: &dyn Device, total_bytes: u64) -> Result<()> {
    let head = WIPED.min(total_bytes);
    zero(device, 0, head)?;
    zero(device, total_bytes.saturating_sub(WIPED).max(head), total_bytes)?;
    wipe_superblocks(device)
}

/// Zeroes all superblock mirrors on the device, so that it is no device of a filesystem any more. The change is durable on
/// return.
pub(crate) fn wipe_superblocks(device: &dyn Device) -> Result<()> {
    for offset in SUPERBLOCK_OFFSETS {
        zero(device, offset, offset.saturating_add(SUPERBLOCK_SIZE as u64).min(device.len_bytes()))?;
    }
    device.flush().map_err(|source| Error::io("flush", device.describe(), 0, 0, source))
}

/// Makes a range read as zeros. Parts that are already zero are not written, so sparse images stay sparse.
fn zero(device: &dyn Device, start: u64, end: u64) -> Result<()> {
    let zeros = vec![0; 64 << 10];
    let mut buf = zeros.clone();
    let mut at = start;
    while at < end {
        let left = usize::try_from(end.saturating_sub(at)).unwrap_or(usize::MAX);
        buf.truncate(left);
        read(device, at, &mut buf)?;
        let zeros = &zeros[..buf.len()];
        if buf != zeros {
            let failed = |source| Error::io("write", device.describe(), at, zeros.len() as u64, source);
            device.write_at(at, zeros).map_err(failed)?;
        }
        at = at.saturating_add(buf.len() as u64);
    }
    Ok(())
}

fn read(device: &dyn Device, offset: u64, buf: &mut [u8]) -> Result<()> {
    let len_bytes = buf.len() as u64;
    device.read_at(offset, buf).map_err(|source| Error::io("read", device.describe(), offset, len_bytes, source))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ubtrfs_device::MemoryDevice;

    #[test]
    fn every_signature_is_found_and_wiped() {
        for signature in &SIGNATURES {
            let device = MemoryDevice::new(2 << 20);
            assert_eq!(detect(&device).unwrap(), None);
            device.write_at(signature.offset, signature.magic).unwrap();
            assert_eq!(detect(&device).unwrap(), Some(signature.name));
            wipe(&device, 2 << 20).unwrap();
            assert_eq!(detect(&device).unwrap(), None);
        }
    }

    #[test]
    fn a_tiny_device_has_no_signature() {
        assert_eq!(detect(&MemoryDevice::new(100)).unwrap(), None);
    }

    #[test]
    fn mirrors_after_the_used_part_are_wiped() {
        let device = MemoryDevice::new(100 << 20);
        device.write_at(SUPERBLOCK_OFFSETS[1] + 64, &MAGIC).unwrap();
        wipe(&device, 32 << 20).unwrap();
        let mut magic = [1; 8];
        device.read_at(SUPERBLOCK_OFFSETS[1] + 64, &mut magic).unwrap();
        assert_eq!(magic, [0; 8]);
    }
}
