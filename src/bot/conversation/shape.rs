//! The shape of a state, read off its `Deserialize`: part of a flow's fingerprint (SPEC C6).
//!
//! Problem: a replica of the next release must notice that a stored state is not its own, without
//! its author deriving anything more than serde's two traits.
//! Idea: a deserializer that only notes what the type asks for. A type cannot be asked for all of
//! its parts at once, since it wants a value for each before it goes on; so each run follows one
//! path, notes what stands at its end, and fails there on purpose.
//! What it cannot see into is noted as what it is asked as: `flatten` asks for a map, `untagged` for
//! anything. [`super::Flow::version`] is for those.

use serde::de::{
    DeserializeOwned, DeserializeSeed, Deserializer, EnumAccess, Error as _, MapAccess, SeqAccess,
    VariantAccess, Visitor, value::Error, value::StrDeserializer,
};

/// Parts looked at in all, and how deep: a type may contain itself.
const PARTS_MAX: usize = 2_000;
const DEPTH_MAX: usize = 8;

/// The shape of `T`, as text. Equal types have equal shapes, in every build.
pub(super) fn of<T: DeserializeOwned>() -> String {
    let (mut shape, mut left) = (String::new(), PARTS_MAX);
    explore::<T>(&mut Vec::new(), &mut shape, &mut left);
    shape
}

/// FNV-1a: the same in every build, unlike the standard library's hashes.
pub(super) fn hash(text: &str) -> String {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    format!("{:016x}", text.bytes().fold(0xcbf2_9ce4_8422_2325, step))
}

fn explore<T: DeserializeOwned>(path: &mut Vec<usize>, shape: &mut String, left: &mut usize) {
    let Some(rest) = left.checked_sub(1) else { return };
    *left = rest;
    let mut found = Found::default();
    // It fails on purpose where the path ends; a type that takes what it is filled with on the way
    // there may refuse it, and then that part stays unseen.
    let _ = T::deserialize(Probe { path, found: &mut found, fill: false });
    shape.push_str(if found.what.is_empty() { "?" } else { &found.what });
    if found.parts == 0 {
        return;
    }
    if path.len() >= DEPTH_MAX {
        shape.push('…');
        return;
    }
    shape.push('{');
    for part in 0..found.parts {
        path.push(part);
        explore::<T>(path, shape, left);
        path.pop();
        shape.push(';');
    }
    shape.push('}');
}

/// What stands at the end of the path.
#[derive(Default)]
struct Found {
    what: String,
    parts: usize,
}

/// Follows a path, or (`fill`) makes up the smallest value.
struct Probe<'p> {
    path: &'p [usize],
    found: &'p mut Found,
    fill: bool,
}

impl Probe<'_> {
    /// At the path's end: notes what is asked for, and stops. `Some` = the part to go on with.
    fn at(&mut self, what: String, parts: usize) -> Result<usize, Error> {
        match self.path.split_first() {
            Some((part, rest)) => {
                self.path = rest;
                Ok(*part)
            }
            None => {
                *self.found = Found { what, parts };
                Err(Error::custom("noted"))
            }
        }
    }
}

macro_rules! plain {
    ($($method:ident => $visit:ident($($value:expr)?)),* $(,)?) => {$(
        fn $method<V: Visitor<'de>>(mut self, visitor: V) -> Result<V::Value, Error> {
            if self.fill {
                return visitor.$visit($($value)?);
            }
            // A borrowed and an owned text are stored alike.
            let name = match stringify!($method).trim_start_matches("deserialize_") {
                "str" => "string",
                "byte_buf" => "bytes",
                name => name,
            };
            self.at(name.to_owned(), 0)?;
            Err(Error::custom("a plain value has no parts"))
        }
    )*};
}

impl<'de> Deserializer<'de> for Probe<'_> {
    type Error = Error;

    plain! {
        deserialize_bool => visit_bool(false),
        deserialize_i8 => visit_i8(0), deserialize_i16 => visit_i16(0),
        deserialize_i32 => visit_i32(0), deserialize_i64 => visit_i64(0),
        deserialize_i128 => visit_i128(0),
        deserialize_u8 => visit_u8(0), deserialize_u16 => visit_u16(0),
        deserialize_u32 => visit_u32(0), deserialize_u64 => visit_u64(0),
        deserialize_u128 => visit_u128(0),
        deserialize_f32 => visit_f32(0.0), deserialize_f64 => visit_f64(0.0),
        deserialize_char => visit_char('a'),
        deserialize_str => visit_str(""), deserialize_string => visit_str(""),
        deserialize_bytes => visit_bytes(&[]), deserialize_byte_buf => visit_bytes(&[]),
        deserialize_unit => visit_unit(),
        deserialize_any => visit_unit(), deserialize_ignored_any => visit_unit(),
        deserialize_identifier => visit_str(""),
    }

    fn deserialize_unit_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.deserialize_unit(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(mut self, visitor: V) -> Result<V::Value, Error> {
        if self.fill {
            return visitor.visit_none();
        }
        self.at("option".to_owned(), 1)?;
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Error> {
        // As transparent here as it is in what is stored.
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(mut self, visitor: V) -> Result<V::Value, Error> {
        if self.fill {
            return visitor.visit_seq(Parts { probe: self, next: 0, wanted: None, len: 0 });
        }
        let wanted = self.at("seq".to_owned(), 1)?;
        visitor.visit_seq(Parts { probe: self, next: 0, wanted: Some(wanted), len: 1 })
    }

    fn deserialize_tuple<V: Visitor<'de>>(
        mut self,
        len: usize,
        visitor: V,
    ) -> Result<V::Value, Error> {
        let wanted = if self.fill { None } else { Some(self.at(format!("tuple {len}"), len)?) };
        visitor.visit_seq(Parts { probe: self, next: 0, wanted, len })
    }

    fn deserialize_tuple_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        len: usize,
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.deserialize_tuple(len, visitor)
    }

    fn deserialize_map<V: Visitor<'de>>(mut self, visitor: V) -> Result<V::Value, Error> {
        if self.fill {
            return visitor.visit_map(Fields { probe: self, fields: &[], next: 0, one: None });
        }
        self.at("map".to_owned(), 1)?;
        let one = Some("");
        visitor.visit_map(Fields { probe: self, fields: &[], next: 0, one })
    }

    fn deserialize_struct<V: Visitor<'de>>(
        mut self,
        _name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        if self.fill {
            return visitor.visit_map(Fields { probe: self, fields, next: 0, one: None });
        }
        // By name, so that their order does not count: they are stored by name.
        let mut sorted = fields.to_vec();
        sorted.sort_unstable();
        let part = self.at(format!("struct {}", sorted.join(",")), sorted.len())?;
        let one = sorted.get(part).copied();
        visitor.visit_map(Fields { probe: self, fields: &[], next: 0, one })
    }

    fn deserialize_enum<V: Visitor<'de>>(
        mut self,
        _name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        let mut sorted = variants.to_vec();
        sorted.sort_unstable();
        let part = match self.fill {
            true => 0,
            false => self.at(format!("enum {}", sorted.join(",")), sorted.len())?,
        };
        let variant = sorted.get(part).copied().unwrap_or_default();
        visitor.visit_enum(Variant { probe: self, variant })
    }
}

/// Elements: filled up to the one wanted, and that one followed.
struct Parts<'p> {
    probe: Probe<'p>,
    next: usize,
    wanted: Option<usize>,
    len: usize,
}

impl<'de> SeqAccess<'de> for Parts<'_> {
    type Error = Error;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, Error> {
        if self.next >= self.len {
            return Ok(None);
        }
        let fill = self.wanted != Some(self.next);
        self.next += 1;
        seed.deserialize(self.probe.reborrow(fill)).map(Some)
    }
}

impl Probe<'_> {
    fn reborrow(&mut self, fill: bool) -> Probe<'_> {
        Probe { path: self.path, found: self.found, fill }
    }
}

/// Fields: all filled, or the one followed.
struct Fields<'p> {
    probe: Probe<'p>,
    fields: &'static [&'static str],
    next: usize,
    one: Option<&'static str>,
}

impl<'de> MapAccess<'de> for Fields<'_> {
    type Error = Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, Error> {
        let key = match self.one {
            Some(key) => Some(key).filter(|_| self.next == 0),
            None => self.fields.get(self.next).copied(),
        };
        let Some(key) = key else { return Ok(None) };
        self.next += 1;
        seed.deserialize(StrDeserializer::new(key)).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Error> {
        let fill = self.one.is_none();
        seed.deserialize(self.probe.reborrow(fill))
    }
}

struct Variant<'p> {
    probe: Probe<'p>,
    variant: &'static str,
}

impl<'de, 'p> EnumAccess<'de> for Variant<'p> {
    type Error = Error;
    type Variant = Content<'p>;

    fn variant_seed<V: DeserializeSeed<'de>>(
        self,
        seed: V,
    ) -> Result<(V::Value, Content<'p>), Error> {
        let value = seed.deserialize(StrDeserializer::new(self.variant))?;
        Ok((value, Content(self.probe)))
    }
}

/// What a variant holds.
struct Content<'p>(Probe<'p>);

impl<'de> VariantAccess<'de> for Content<'_> {
    type Error = Error;

    fn unit_variant(mut self) -> Result<(), Error> {
        if self.0.fill {
            return Ok(());
        }
        self.0.at("unit".to_owned(), 0)?;
        Err(Error::custom("a unit has no parts"))
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<T::Value, Error> {
        seed.deserialize(self.0)
    }

    fn tuple_variant<V: Visitor<'de>>(self, len: usize, visitor: V) -> Result<V::Value, Error> {
        self.0.deserialize_tuple(len, visitor)
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.0.deserialize_struct("", fields, visitor)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde::{Deserialize, Serialize};

    use super::*;

    #[derive(Serialize, Deserialize)]
    struct Order {
        item: String,
        count: u32,
        when: Option<(u8, String)>,
        tags: BTreeMap<String, Vec<Tag>>,
    }

    #[derive(Serialize, Deserialize)]
    enum Tag {
        Plain,
        Named(String),
        Sized { width: u8, of: Option<Box<Tag>> },
    }

    #[test]
    fn c6_a_shape_names_every_part_and_is_the_same_in_every_build() {
        let shape = of::<Order>();
        assert!(
            shape.starts_with("struct count,item,tags,when{u32;string;map{seq{enum "),
            "{shape}"
        );
        assert!(shape.contains("option{tuple 2{u8;string;};}"), "{shape}");
        assert!(shape.contains("enum Named,Plain,Sized{string;unit;struct of,width{"), "{shape}");
        assert_eq!(hash(&of::<(u32, String)>()), "c85634b026dbda0e");
    }

    #[test]
    fn c6_what_changes_in_a_state_changes_its_shape() {
        #[derive(Serialize, Deserialize)]
        struct A {
            n: u32,
            s: String,
        }
        #[derive(Serialize, Deserialize)]
        struct Swapped {
            s: String,
            n: u32,
        }
        #[derive(Serialize, Deserialize)]
        struct Wider {
            n: u64,
            s: String,
        }
        #[derive(Serialize, Deserialize)]
        struct More {
            n: u32,
            s: String,
            #[serde(default)]
            more: bool,
        }
        #[derive(Serialize, Deserialize)]
        struct Renamed {
            #[serde(rename = "n")]
            number: u32,
            s: String,
        }
        assert_eq!(of::<A>(), of::<Swapped>(), "fields are stored by name");
        assert_eq!(of::<A>(), of::<Renamed>(), "what counts is what is stored");
        assert_ne!(of::<A>(), of::<Wider>());
        assert_ne!(of::<A>(), of::<More>());
        assert_ne!(of::<(u32, u32)>(), of::<(u32, u64)>());
        assert_ne!(of::<Vec<u32>>(), of::<Vec<String>>());
    }

    #[test]
    fn c6_types_of_others_have_a_shape_too() {
        assert_eq!(of::<uuid::Uuid>(), "string");
        assert_eq!(of::<serde_json::Value>(), "any");
        assert_eq!(of::<()>(), "unit");
        // A value that refuses what it is filled with hides what follows it, and nothing else.
        assert_eq!(of::<(uuid::Uuid, u32)>(), "tuple 2{string;?;}");
        #[derive(Serialize, Deserialize)]
        struct Chain {
            next: Option<Box<Chain>>,
        }
        assert!(of::<Chain>().contains('…'), "a type that contains itself ends");
    }
}
