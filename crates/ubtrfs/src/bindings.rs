//! What the interfaces to other languages share: names of options, and times as numbers.

use std::time::{Duration, SystemTime};

use ubtrfs_format::item::BlockGroupFlags;
use ubtrfs_format::{CsumType, Profile};
use ubtrfs_mkfs::MkfsOptions;

/// Sets the profiles of a new filesystem on `nr_devices` devices. Profiles without a name are the usual ones for so many
/// devices.
///
/// # Errors
/// A text with the wrong name, and the names that there are.
#[doc(hidden)]
pub fn set_profiles(
    options: MkfsOptions,
    nr_devices: usize,
    data: Option<&str>,
    metadata: Option<&str>,
) -> Result<MkfsOptions, String> {
    let mut options = if nr_devices > 1 { options.with_array_profiles() } else { options };
    if nr_devices <= 1 && options.mixed {
        options.metadata_profile = options.data_profile;
    }
    if let Some(name) = data {
        options.data_profile = profile(name)?;
    }
    if let Some(name) = metadata {
        options.metadata_profile = profile(name)?;
    }
    Ok(options)
}

/// The algorithm of checksums that a name means.
///
/// # Errors
/// A text with the wrong name, and the names that there are.
#[doc(hidden)]
pub fn csum_type(name: &str) -> Result<CsumType, String> {
    Ok(match name {
        "crc32c" => CsumType::Crc32c,
        "xxhash" => CsumType::Xxhash,
        "sha256" => CsumType::Sha256,
        "blake2" => CsumType::Blake2,
        _ => return Err(format!("csum is '{name}'; give crc32c, xxhash, sha256 or blake2")),
    })
}

/// The profile that a name means.
///
/// # Errors
/// A text with the wrong name, and the names that there are.
#[doc(hidden)]
pub fn profile(name: &str) -> Result<BlockGroupFlags, String> {
    Ok(match name {
        "single" => BlockGroupFlags::empty(),
        "dup" => BlockGroupFlags::DUP,
        "raid0" => BlockGroupFlags::RAID0,
        "raid1" => BlockGroupFlags::RAID1,
        "raid1c3" => BlockGroupFlags::RAID1C3,
        "raid1c4" => BlockGroupFlags::RAID1C4,
        "raid10" => BlockGroupFlags::RAID10,
        _ => {
            let names = "single, dup, raid0, raid1, raid1c3, raid1c4 or raid10";
            return Err(format!("the profile is '{name}'; give {names}"));
        }
    })
}

/// The names of the type and the profile of block groups, as `data` and `raid1`.
#[doc(hidden)]
pub fn group_names(flags: BlockGroupFlags) -> (&'static str, String) {
    let is = |kind| flags.contains(kind);
    let kind = match (is(BlockGroupFlags::DATA), is(BlockGroupFlags::METADATA), is(BlockGroupFlags::SYSTEM)) {
        (true, true, _) => "data+metadata",
        (true, false, _) => "data",
        (false, true, _) => "metadata",
        (false, false, true) => "system",
        (false, false, false) => "unknown",
    };
    (kind, Profile::name_of(flags).to_ascii_lowercase())
}

/// The time of seconds since 1970, rounded down, and nanoseconds. `None` if it is out of range.
#[doc(hidden)]
pub fn system_time(seconds: i64, nanoseconds: u32) -> Option<SystemTime> {
    let distance = Duration::from_secs(seconds.unsigned_abs());
    let second = match seconds < 0 {
        true => SystemTime::UNIX_EPOCH.checked_sub(distance),
        false => SystemTime::UNIX_EPOCH.checked_add(distance),
    };
    second.and_then(|second| second.checked_add(Duration::from_nanos(nanoseconds.into())))
}
