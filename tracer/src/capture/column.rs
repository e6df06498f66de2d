//! Structs ↔ Arrow columns.
//!
//! [`Columns`] lays one Rust value out over one or more named columns, so that events and rows go to files and come
//! back without a second set of structs. `columns!` implements it for a struct by listing its fields, `words!` for
//! an enum by listing its names, `via!` for a type that is stored as another one.

use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, BooleanArray, BooleanBuilder, ListArray, PrimitiveArray, PrimitiveBuilder, RecordBatch,
    StructArray,
};
use arrow::buffer::OffsetBuffer;
use arrow::datatypes::{
    DataType, Field, Fields, Float32Type, Float64Type, Int64Type, UInt8Type, UInt16Type, UInt32Type,
    UInt64Type,
};
use arrow::error::ArrowError;

use crate::hex::hex;

/// Why columns cannot be read as the expected type.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ColumnError {
    #[error("column {0} is missing")]
    Missing(String),
    #[error("column {column} is {found}, not {expected}")]
    Type { column: String, expected: DataType, found: DataType },
    #[error("column value `{0}` is not one that this version knows")]
    Value(String),
}

/// Named columns to read from: a record batch or the inside of a struct.
#[derive(Clone, Copy)]
pub(crate) struct Source<'a> {
    fields: &'a Fields,
    columns: &'a [ArrayRef],
}

impl<'a> From<&'a RecordBatch> for Source<'a> {
    fn from(batch: &'a RecordBatch) -> Self {
        Self { fields: batch.schema_ref().fields(), columns: batch.columns() }
    }
}

impl<'a> From<&'a StructArray> for Source<'a> {
    fn from(array: &'a StructArray) -> Self {
        Self { fields: array.fields(), columns: array.columns() }
    }
}

impl<'a> Source<'a> {
    fn column(self, name: &str) -> Result<&'a ArrayRef, ColumnError> {
        let found = self.fields.find(name).and_then(|(index, _)| self.columns.get(index));
        found.ok_or_else(|| ColumnError::Missing(name.into()))
    }

    fn typed<A: Array + Clone + 'static>(self, name: &str, expected: &DataType) -> Result<A, ColumnError> {
        let array = self.column(name)?;
        array.as_any().downcast_ref::<A>().cloned().ok_or_else(|| ColumnError::Type {
            column: name.into(),
            expected: expected.clone(),
            found: array.data_type().clone(),
        })
    }
}

/// A value that is stored in one or more columns.
pub(crate) trait Columns: Sized {
    type Builder: Default;
    type Reader;

    /// Adds the columns' names and types. A value of one column calls it `name`; others name theirs themselves.
    fn fields(name: &str, out: &mut Vec<Field>);

    /// Appends one row.
    fn push(&self, builder: &mut Self::Builder);

    /// Takes the rows so far out of the builder, one array per field.
    ///
    /// # Errors
    /// When the rows do not fit in one batch.
    fn finish(builder: &mut Self::Builder, out: &mut Vec<ArrayRef>) -> Result<(), ArrowError>;

    /// Finds the columns.
    ///
    /// # Errors
    /// When one is missing or has another type.
    fn open(name: &str, source: Source<'_>) -> Result<Self::Reader, ColumnError>;

    /// Reads a row, which must be below the number of rows of the source.
    ///
    /// # Errors
    /// When a stored value is not one that this version knows.
    fn get(reader: &Self::Reader, row: usize) -> Result<Self, ColumnError>;
}

/// A value that is one cell of one column, and may be null in an `Option`.
pub(crate) trait Scalar: Sized {
    type Builder: Default;
    type Array: Array + Clone + 'static;

    fn data_type() -> DataType;
    fn append(value: Option<&Self>, builder: &mut Self::Builder);
    fn array(builder: &mut Self::Builder) -> Self::Array;
    /// # Errors
    /// As [`Columns::get`].
    fn cell(array: &Self::Array, row: usize) -> Result<Self, ColumnError>;
}

impl<T: Scalar> Columns for T {
    type Builder = T::Builder;
    type Reader = T::Array;

    fn fields(name: &str, out: &mut Vec<Field>) {
        out.push(Field::new(name, T::data_type(), false));
    }

    fn push(&self, builder: &mut Self::Builder) {
        T::append(Some(self), builder);
    }

    fn finish(builder: &mut Self::Builder, out: &mut Vec<ArrayRef>) -> Result<(), ArrowError> {
        out.push(Arc::new(T::array(builder)));
        Ok(())
    }

    fn open(name: &str, source: Source<'_>) -> Result<Self::Reader, ColumnError> {
        source.typed(name, &T::data_type())
    }

    fn get(reader: &Self::Reader, row: usize) -> Result<Self, ColumnError> {
        T::cell(reader, row)
    }
}

impl<T: Scalar> Columns for Option<T> {
    type Builder = T::Builder;
    type Reader = T::Array;

    fn fields(name: &str, out: &mut Vec<Field>) {
        out.push(Field::new(name, T::data_type(), true));
    }

    fn push(&self, builder: &mut Self::Builder) {
        T::append(self.as_ref(), builder);
    }

    fn finish(builder: &mut Self::Builder, out: &mut Vec<ArrayRef>) -> Result<(), ArrowError> {
        T::finish(builder, out)
    }

    fn open(name: &str, source: Source<'_>) -> Result<Self::Reader, ColumnError> {
        T::open(name, source)
    }

    fn get(reader: &Self::Reader, row: usize) -> Result<Self, ColumnError> {
        if reader.is_null(row) { Ok(None) } else { T::cell(reader, row).map(Some) }
    }
}

macro_rules! number {
    ($($native:ty => $arrow:ty = $data_type:ident;)*) => {$(
        impl Scalar for $native {
            type Builder = PrimitiveBuilder<$arrow>;
            type Array = PrimitiveArray<$arrow>;

            fn data_type() -> DataType {
                DataType::$data_type
            }

            fn append(value: Option<&Self>, builder: &mut Self::Builder) {
                builder.append_option(value.copied());
            }

            fn array(builder: &mut Self::Builder) -> Self::Array {
                builder.finish()
            }

            fn cell(array: &Self::Array, row: usize) -> Result<Self, ColumnError> {
                Ok(array.value(row))
            }
        }
    )*};
}

number! {
    u8 => UInt8Type = UInt8;
    u16 => UInt16Type = UInt16;
    u32 => UInt32Type = UInt32;
    u64 => UInt64Type = UInt64;
    i64 => Int64Type = Int64;
    f32 => Float32Type = Float32;
    f64 => Float64Type = Float64;
}

impl Scalar for bool {
    type Builder = BooleanBuilder;
    type Array = BooleanArray;

    fn data_type() -> DataType {
        DataType::Boolean
    }

    fn append(value: Option<&Self>, builder: &mut Self::Builder) {
        builder.append_option(value.copied());
    }

    fn array(builder: &mut Self::Builder) -> Self::Array {
        builder.finish()
    }

    fn cell(array: &Self::Array, row: usize) -> Result<Self, ColumnError> {
        Ok(array.value(row))
    }
}

/// Implements `Scalar` for types stored as text: `text!(Type, |value| text, |text| Option<value>)`.
macro_rules! text {
    ($type:ty, $to:expr, $from:expr) => {
        impl $crate::capture::column::Scalar for $type {
            type Builder = arrow::array::StringBuilder;
            type Array = arrow::array::StringArray;

            fn data_type() -> arrow::datatypes::DataType {
                arrow::datatypes::DataType::Utf8
            }

            fn append(value: Option<&Self>, builder: &mut Self::Builder) {
                builder.append_option(value.map($to));
            }

            fn array(builder: &mut Self::Builder) -> Self::Array {
                builder.finish()
            }

            fn cell(array: &Self::Array, row: usize) -> Result<Self, $crate::capture::column::ColumnError> {
                let text = array.value(row);
                ($from)(text).ok_or_else(|| $crate::capture::column::ColumnError::Value(text.into()))
            }
        }
    };
}

/// Implements `Scalar` for an enum by the names of its variants.
macro_rules! words {
    ($type:ty { $($variant:ident = $word:literal),* $(,)? }) => {
        $crate::capture::column::text!(
            $type,
            |value: &$type| match value { $(<$type>::$variant => $word),* },
            |text: &str| match text { $($word => Some(<$type>::$variant),)* _ => None }
        );
    };
}

text!(String, String::as_str, |text: &str| Some(text.to_owned()));
text!(Vec<u8>, |bytes: &Vec<u8>| hex(bytes), from_hex);
text!([u8; 8], |bytes: &[u8; 8]| hex(bytes), |text| from_hex(text)?.try_into().ok());
text!([u8; 16], |bytes: &[u8; 16]| hex(bytes), |text| from_hex(text)?.try_into().ok());

fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digit = |c: u8| char::from(c).to_digit(16).and_then(|d| u8::try_from(d).ok());
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    if !rest.is_empty() {
        return None;
    }
    pairs.iter().map(|[high, low]| Some(digit(*high)? << 4 | digit(*low)?)).collect()
}

/// An element of a list column: a struct when `STRUCT`, else a single value.
pub(crate) trait Item: Columns {
    const STRUCT: bool;
}

impl Item for u64 {
    const STRUCT: bool = false;
}

const ITEM: &str = "item";

fn item_field<T: Item>() -> Arc<Field> {
    let mut fields = Vec::new();
    T::fields(ITEM, &mut fields);
    match fields.pop() {
        Some(field) if !T::STRUCT => Arc::new(field),
        last => {
            fields.extend(last);
            Arc::new(Field::new(ITEM, DataType::Struct(fields.into()), false))
        }
    }
}

/// Builder of a list column.
pub(crate) struct ListBuilder<T: Item> {
    items: T::Builder,
    lengths: Vec<usize>,
}

impl<T: Item> Default for ListBuilder<T> {
    fn default() -> Self {
        Self { items: T::Builder::default(), lengths: Vec::new() }
    }
}

/// Reader of a list column.
pub(crate) struct ListReader<T: Item> {
    offsets: OffsetBuffer<i32>,
    items: T::Reader,
}

impl<T: Item> Columns for Vec<T> {
    type Builder = ListBuilder<T>;
    type Reader = ListReader<T>;

    fn fields(name: &str, out: &mut Vec<Field>) {
        out.push(Field::new(name, DataType::List(item_field::<T>()), false));
    }

    fn push(&self, builder: &mut Self::Builder) {
        self.iter().for_each(|item| item.push(&mut builder.items));
        builder.lengths.push(self.len());
    }

    fn finish(builder: &mut Self::Builder, out: &mut Vec<ArrayRef>) -> Result<(), ArrowError> {
        let lengths = std::mem::take(&mut builder.lengths);
        let total: usize = lengths.iter().sum();
        let mut columns = Vec::new();
        T::finish(&mut builder.items, &mut columns)?;
        i32::try_from(total).map_err(|_| ArrowError::OffsetOverflowError(total))?;
        let field = item_field::<T>();
        let items: ArrayRef = match (field.data_type(), columns.pop()) {
            (DataType::Struct(fields), last) => {
                columns.extend(last);
                Arc::new(StructArray::try_new(fields.clone(), columns, None)?)
            }
            (_, Some(column)) => column,
            (_, None) => return Err(ArrowError::SchemaError("a list item without a column".into())),
        };
        out.push(Arc::new(ListArray::try_new(field, OffsetBuffer::from_lengths(lengths), items, None)?));
        Ok(())
    }

    fn open(name: &str, source: Source<'_>) -> Result<Self::Reader, ColumnError> {
        let list: ListArray = source.typed(name, &DataType::List(item_field::<T>()))?;
        let items = if T::STRUCT {
            let inside = list.values().as_any().downcast_ref::<StructArray>();
            T::open(ITEM, inside.ok_or_else(|| ColumnError::Missing(format!("{name}.{ITEM}")))?.into())?
        } else {
            let fields = Fields::from(vec![Field::new(ITEM, list.value_type(), true)]);
            T::open(ITEM, Source { fields: &fields, columns: std::slice::from_ref(list.values()) })?
        };
        Ok(ListReader { offsets: list.offsets().clone(), items })
    }

    fn get(reader: &Self::Reader, row: usize) -> Result<Self, ColumnError> {
        let bound = |i: usize| reader.offsets.get(i).and_then(|&o| usize::try_from(o).ok()).unwrap_or(0);
        (bound(row)..bound(row + 1)).map(|item| T::get(&reader.items, item)).collect()
    }
}

/// Implements `Columns` for a struct by its fields: `columns!(Type { field: FieldType, other as "column": u64 })`.
///
/// A field whose type has several columns is flattened into the struct's own.
macro_rules! columns {
    (@name $field:ident) => { stringify!($field) };
    (@name $field:ident $name:literal) => { $name };
    ($type:ty { $($field:ident $(as $name:literal)? : $field_type:ty),* $(,)? }) => {
        const _: () = {
            use $crate::capture::column::{self, Columns, columns};

            #[derive(Default)]
            pub(crate) struct Builder { $($field: <$field_type as Columns>::Builder),* }
            pub(crate) struct Reader { $($field: <$field_type as Columns>::Reader),* }

            impl Columns for $type {
                type Builder = Builder;
                type Reader = Reader;

                fn fields(_: &str, out: &mut Vec<arrow::datatypes::Field>) {
                    $(<$field_type as Columns>::fields(columns!(@name $field $($name)?), out);)*
                }

                fn push(&self, builder: &mut Builder) {
                    $(self.$field.push(&mut builder.$field);)*
                }

                fn finish(
                    builder: &mut Builder,
                    out: &mut Vec<arrow::array::ArrayRef>,
                ) -> Result<(), arrow::error::ArrowError> {
                    $(<$field_type as Columns>::finish(&mut builder.$field, out)?;)*
                    Ok(())
                }

                fn open(_: &str, source: column::Source<'_>) -> Result<Reader, column::ColumnError> {
                    Ok(Reader {
                        $($field: <$field_type as Columns>::open(columns!(@name $field $($name)?), source)?,)*
                    })
                }

                fn get(reader: &Reader, row: usize) -> Result<Self, column::ColumnError> {
                    Ok(Self { $($field: <$field_type as Columns>::get(&reader.$field, row)?,)* })
                }
            }
        };
    };
}

/// Implements `Columns` for a type that is stored as another: `via!(Type => Stored, to_stored, from_stored)`.
macro_rules! via {
    ($type:ty => $stored:ty, $to:expr, $from:expr) => {
        impl $crate::capture::column::Columns for $type {
            type Builder = <$stored as $crate::capture::column::Columns>::Builder;
            type Reader = <$stored as $crate::capture::column::Columns>::Reader;

            fn fields(name: &str, out: &mut Vec<arrow::datatypes::Field>) {
                <$stored>::fields(name, out);
            }

            fn push(&self, builder: &mut Self::Builder) {
                ($to)(self).push(builder);
            }

            fn finish(
                builder: &mut Self::Builder,
                out: &mut Vec<arrow::array::ArrayRef>,
            ) -> Result<(), arrow::error::ArrowError> {
                <$stored>::finish(builder, out)
            }

            fn open(
                name: &str,
                source: $crate::capture::column::Source<'_>,
            ) -> Result<Self::Reader, $crate::capture::column::ColumnError> {
                <$stored>::open(name, source)
            }

            fn get(reader: &Self::Reader, row: usize) -> Result<Self, $crate::capture::column::ColumnError> {
                <$stored>::get(reader, row).map($from)
            }
        }
    };
}

pub(crate) use {columns, text, via, words};
