//! Checked little-endian reading and writing of fixed layouts. No panics on any input.

use crate::error::FormatError;

/// Reads fields in sequence from a slice; every read is checked.
#[derive(Clone, Debug)]
pub struct Reader<'a> {
    what: &'static str,
    data: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    /// Makes a reader that begins at the start of `data`; `what` names the structure in errors.
    pub fn new(what: &'static str, data: &'a [u8]) -> Self {
        Self { what, data, at: 0 }
    }

    /// Returns a reader over the next `len_bytes` bytes.
    #[inline]
    pub fn part(&mut self, len_bytes: usize) -> Result<Self, FormatError> {
        Ok(Self { what: self.what, data: self.bytes(len_bytes)?, at: 0 })
    }

    /// The next `len_bytes` bytes.
    #[inline]
    pub fn bytes(&mut self, len_bytes: usize) -> Result<&'a [u8], FormatError> {
        let end = self.at.saturating_add(len_bytes);
        let bytes = self.data.get(self.at..end).ok_or(FormatError::Short {
            what: self.what,
            need: end,
            have: self.data.len(),
        })?;
        self.at = end;
        Ok(bytes)
    }

    /// The next `N` bytes as an array.
    #[inline]
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], FormatError> {
        let mut array = [0; N];
        array.copy_from_slice(self.bytes(N)?);
        Ok(array)
    }

    /// The bytes not read yet.
    pub fn rest(&mut self) -> &'a [u8] {
        let rest = self.data.get(self.at..).unwrap_or_default();
        self.at = self.data.len();
        rest
    }

    /// Whether all bytes were read.
    pub fn is_empty(&self) -> bool {
        self.at >= self.data.len()
    }
}

/// A value of fixed size on disk.
pub trait Field: Sized {
    /// Bytes on disk.
    const SIZE: usize;
    /// Reads the value.
    fn read(reader: &mut Reader<'_>) -> Result<Self, FormatError>;
    /// Overwrites `out`, which has [`Field::SIZE`] bytes, with the value.
    fn store(&self, out: &mut [u8]);
    /// Appends the value to `out`.
    fn write(&self, out: &mut Vec<u8>) {
        let before = out.len();
        out.resize(before.saturating_add(Self::SIZE), 0);
        self.store(out.split_at_mut(before).1);
    }
}

macro_rules! int_field {
    ($($int:ty),*) => {$(
        impl Field for $int {
            const SIZE: usize = size_of::<$int>();
            #[inline]
            fn read(reader: &mut Reader<'_>) -> Result<Self, FormatError> {
                Ok(Self::from_le_bytes(reader.array()?))
            }
            #[inline]
            fn store(&self, out: &mut [u8]) {
                out.copy_from_slice(&self.to_le_bytes());
            }
        }
    )*};
}
int_field!(u8, u16, u32, u64, i64);

impl<const N: usize> Field for [u8; N] {
    const SIZE: usize = N;
    #[inline]
    fn read(reader: &mut Reader<'_>) -> Result<Self, FormatError> {
        reader.array()
    }
    fn store(&self, out: &mut [u8]) {
        out.copy_from_slice(self);
    }
}

impl<const N: usize> Field for [u64; N] {
    const SIZE: usize = N * 8;
    #[inline]
    fn read(reader: &mut Reader<'_>) -> Result<Self, FormatError> {
        let mut array = [0; N];
        for value in &mut array {
            *value = u64::read(reader)?;
        }
        Ok(array)
    }
    #[inline]
    fn store(&self, out: &mut [u8]) {
        out.chunks_exact_mut(8).zip(self).for_each(|(out, value)| value.store(out));
    }
}

impl Field for crate::key::Key {
    const SIZE: usize = crate::key::Key::SIZE;
    #[inline]
    fn read(reader: &mut Reader<'_>) -> Result<Self, FormatError> {
        Ok(Self::decode(&reader.array()?))
    }
    fn store(&self, out: &mut [u8]) {
        out.copy_from_slice(&self.encode());
    }
}

impl Field for uuid::Uuid {
    const SIZE: usize = 16;
    fn read(reader: &mut Reader<'_>) -> Result<Self, FormatError> {
        Ok(Self::from_bytes(reader.array()?))
    }
    fn store(&self, out: &mut [u8]) {
        out.copy_from_slice(self.as_bytes());
    }
}

macro_rules! id_field {
    ($($id:ident),*) => {$(
        impl Field for crate::ids::$id {
            const SIZE: usize = 8;
            #[inline]
            fn read(reader: &mut Reader<'_>) -> Result<Self, FormatError> {
                Ok(Self(u64::read(reader)?))
            }
            #[inline]
            fn store(&self, out: &mut [u8]) {
                self.0.store(out);
            }
        }
    )*};
}
id_field!(Logical, Physical, RootId, Ino, DevId, Generation);

/// Defines a structure of fixed layout: its fields in disk order, packed.
///
/// Generates `SIZE`, `decode` (which accepts longer input and ignores the rest), `encode`, [`Field`] and a JSON form.
#[macro_export]
macro_rules! disk_struct {
    ($(#[$doc:meta])* $name:ident { $($(#[$fdoc:meta])* $field:ident: $ty:ty),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub struct $name { $($(#[$fdoc])* pub $field: $ty),* }

        impl $name {
            /// Bytes on disk.
            pub const SIZE: usize = 0 $(+ <$ty as $crate::codec::Field>::SIZE)*;

            /// Reads the structure from the head of `data`.
            pub fn decode(data: &[u8]) -> Result<Self, $crate::error::FormatError> {
                let mut reader = $crate::codec::Reader::new(stringify!($name), data);
                <Self as $crate::codec::Field>::read(&mut reader)
            }

            /// Encodes the structure as its bytes on disk.
            pub fn encode(&self) -> Vec<u8> {
                self.encode_array().to_vec()
            }

            /// Encodes the structure into an array, without allocating.
            pub fn encode_array(&self) -> [u8; Self::SIZE] {
                let mut out = [0; Self::SIZE];
                $crate::codec::Field::store(self, &mut out);
                out
            }
        }

        impl $crate::codec::Field for $name {
            const SIZE: usize = Self::SIZE;
            fn read(reader: &mut $crate::codec::Reader<'_>) -> Result<Self, $crate::error::FormatError> {
                // One length check covers all fields.
                let mut fields = reader.part(Self::SIZE)?;
                Ok(Self { $($field: $crate::codec::Field::read(&mut fields)?),* })
            }
            #[inline]
            fn store(&self, out: &mut [u8]) {
                $(let (field, out) = out.split_at_mut(<$ty as $crate::codec::Field>::SIZE);
                  $crate::codec::Field::store(&self.$field, field);)*
                debug_assert!(out.is_empty(), "the fields fill the structure");
            }
        }

        impl $crate::print::ToJson for $name {
            fn to_json(&self) -> serde_json::Value {
                let mut object = serde_json::Map::new();
                $(object.insert(stringify!($field).to_owned(), $crate::print::ToJson::to_json(&self.$field));)*
                serde_json::Value::Object(object)
            }
        }
    };
}
